//! A service on TCP.

use std::time::{Duration, Instant};

use fdmap_client::grpc::{Tls, TlsAddress};
use fdmap_client::{Client, ClientError, Timeouts};
use fdmap_tests::HarnessResult;
use fdmap_tests::certificates::Certificates;
use fdmap_tests::service::Service;

/// A service on TCP.
pub struct TcpService {
    pub service: Service,
    pub port: u16,
}

impl TcpService {
    /// Starts a service with the certificate "service" and further options.
    pub fn start(certificates: &Certificates, options: &[&str]) -> Self {
        Self::try_start_by(certificates, options, Service::start).unwrap()
    }

    /// The same by `start`.
    pub fn start_by(
        certificates: &Certificates,
        options: &[&str],
        start: impl FnOnce(&[&str]) -> Service,
    ) -> Self {
        Self::try_start_by(certificates, options, |arguments| Ok(start(arguments))).unwrap()
    }

    /// The same, with the error of `start`.
    pub fn try_start_by(
        certificates: &Certificates,
        options: &[&str],
        start: impl FnOnce(&[&str]) -> HarnessResult<Service>,
    ) -> HarnessResult<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let path = |file: &str| certificates.path(file).to_str().unwrap().to_owned();
        let (tcp, certificate, key) = (format!("127.0.0.1:{port}"), path("service"), path("service.key"));
        let authority = path("ca");
        let mut arguments = vec!["--tcp", &tcp, "--tls-cert", &certificate, "--tls-key", &key];
        arguments.extend(["--tls-client-ca", &authority]);
        arguments.extend(options);
        Ok(Self { service: start(&arguments)?, port })
    }

    pub async fn connect(&self, tls: Tls) -> Result<Client, ClientError> {
        connect(self.port, tls).await
    }

    /// The user that the service maps a client to.
    pub async fn uid(&self, tls: Tls) -> Result<u32, ClientError> {
        Ok(self.connect(tls).await?.host_info().await?.caller_uid)
    }

    /// Asserts that the service closes the connection of a client. With TLS 1.3 it does so after the handshake is complete
    /// for the client.
    #[track_caller]
    pub fn assert_closed<T>(&self, result: Result<T, ClientError>) {
        match result {
            Err(ClientError::Unreachable { .. } | ClientError::Broken(_)) => {}
            Err(other) => panic!("{other:?}\n{}", self.service.log()),
            Ok(_) => panic!("the connection works"),
        }
    }

    /// Sends SIGHUP, and waits for the next line of the log that contains `text`. Returns it.
    #[track_caller]
    pub fn reload(&self, text: &str) -> String {
        let before = self.service.log().lines().count();
        self.service.signal(nix::sys::signal::Signal::SIGHUP);
        self.logged(before, text)
    }

    /// The first line after `skip` lines of the log that contains `text`. Waits for it.
    #[track_caller]
    pub fn logged(&self, skip: usize, text: &str) -> String {
        let began = Instant::now();
        loop {
            let log = self.service.log();
            if let Some(line) = log.lines().skip(skip).find(|line| line.contains(text)) {
                return line.to_owned();
            }
            assert!(began.elapsed() < Duration::from_secs(20), "no line with {text:?}:\n{log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

pub async fn connect(port: u16, tls: Tls) -> Result<Client, ClientError> {
    let address = TlsAddress { uri: format!("https://127.0.0.1:{port}"), tls };
    Client::connect_tls(&address, Timeouts::default()).await
}
