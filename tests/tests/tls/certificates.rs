//! A certificate authority, the certificates that it signed, and a service that accepts them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fdmap_client::grpc::{Tls, TlsAddress};
use fdmap_client::{Client, ClientError, Timeouts};
use fdmap_tests::service::Service;
use rcgen::{CertificateParams, CertificateRevocationListParams, RevokedCertParams, SanType, SerialNumber};

/// The certificates are files in a directory: NAME and NAME.key.
pub struct Certificates {
    folder: tempfile::TempDir,
    authority: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

/// A service on TCP.
pub struct TcpService {
    pub service: Service,
    pub port: u16,
}

pub fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().unwrap())
}

pub fn uri(name: &str) -> SanType {
    SanType::URI(name.try_into().unwrap())
}

impl Certificates {
    /// An authority, and the certificate "service".
    pub fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let authority =
            rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap();
        std::fs::write(folder.path().join("ca"), authority.pem()).unwrap();
        let certificates = Self { folder, authority };
        certificates.sign("service", dns("fdmapd.test"), 1);
        certificates
    }

    /// Writes a certificate with one subject alternative name.
    pub fn sign(&self, file: &str, name: SanType, serial: u64) {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = vec![name];
        params.serial_number = Some(SerialNumber::from(serial));
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        std::fs::write(self.path(file), certificate.pem()).unwrap();
        std::fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
    }

    /// Writes the file "crl", which revokes certificates by serial number and is current until `year`.
    pub fn revoke(&self, serials: &[u64], year: i32) {
        let past = rcgen::date_time_ymd(2020, 1, 1);
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: past,
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: past,
            next_update: rcgen::date_time_ymd(year, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.authority).unwrap().pem().unwrap();
        std::fs::write(self.path("crl"), list).unwrap();
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    pub fn tls(&self, file: &str) -> Tls {
        Tls {
            ca: self.path("ca"),
            cert: self.path(file),
            key: self.path(&format!("{file}.key")),
            server_name: Some("fdmapd.test".to_owned()),
        }
    }

    /// Starts a service with the certificate "service" and further options.
    pub fn service(&self, options: &[&str]) -> TcpService {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let path = |file: &str| self.path(file).to_str().unwrap().to_owned();
        let (tcp, certificate, key) = (format!("127.0.0.1:{port}"), path("service"), path("service.key"));
        let authority = path("ca");
        let mut arguments = vec!["--tcp", &tcp, "--tls-cert", &certificate, "--tls-key", &key];
        arguments.extend(["--tls-client-ca", &authority]);
        arguments.extend(options);
        TcpService { service: Service::start(&arguments).unwrap(), port }
    }
}

impl TcpService {
    pub async fn connect(&self, tls: Tls) -> Result<Client, ClientError> {
        let address = TlsAddress { uri: format!("https://127.0.0.1:{}", self.port), tls };
        Client::connect_tls(&address, Timeouts::default()).await
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
