//! Connections that are slow, silent, too many, or of an old TLS version.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_tests::certificates::{Certificates, dns};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::test;
use fdmap_tests::victim::MAX_DELAY;
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ProtocolVersion, RootCertStore, SupportedProtocolVersion, version};

use super::tcp_service::TcpService;

/// Deadline of the service for a handshake, and for the HTTP/2 preface.
const SERVICE_TIMEOUT: Duration = Duration::from_secs(10);

/// Completes a TLS handshake, and sends nothing more.
pub async fn handshake(
    certificates: &Certificates,
    port: u16,
    file: &str,
    version: &'static SupportedProtocolVersion,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certificates.path("ca")).unwrap()).unwrap();
    let chain = vec![CertificateDer::from_pem_file(certificates.path(file)).unwrap()];
    let key = PrivateKeyDer::from_pem_file(certificates.path(&format!("{file}.key"))).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let name = ServerName::try_from("fdmapd.test").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// The time until the service closes a connection. It sends at most its HTTP/2 settings.
async fn closed_after(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Duration {
    let began = Instant::now();
    let mut buffer = [0; 1024];
    let ended = async { while stream.read(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {} };
    tokio::time::timeout(SERVICE_TIMEOUT * 3, ended).await.expect("the service closes the connection");
    began.elapsed()
}

#[test]
async fn tls_1_2_is_refused_unless_allowed() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    let old = async |options: &[&str]| {
        let tcp = TcpService::start(&certificates, &[&["--tls-peer", "vmm.test=1000"], options].concat());
        assert_eq!(tcp.uid(certificates.tls("vmm")).await.unwrap(), 1000);
        handshake(&certificates, tcp.port, "vmm", &version::TLS12).await
    };
    old(&[]).await.unwrap_err();
    old(&["--tls-min-version", "1.3"]).await.unwrap_err();
    let stream = old(&["--tls-min-version", "1.2"]).await.unwrap();
    assert_eq!(stream.get_ref().1.protocol_version(), Some(ProtocolVersion::TLSv1_2));
}

#[test]
async fn connections_without_a_user_are_closed_at_once_and_do_not_count() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    certificates.sign("stranger", dns("stranger.test"), 3);
    let tcp =
        TcpService::start(&certificates, &["--tls-peer", "vmm.test=1000", "--max-sessions-per-user", "1"]);
    for _ in 0..30 {
        let mut stream =
            handshake(&certificates, tcp.port, "stranger", &version::TLS13).await.expect("a handshake");
        let after = closed_after(&mut stream).await;
        assert!(after < SERVICE_TIMEOUT / 2, "{after:?}");
    }
    assert_eq!(tcp.uid(certificates.tls("vmm")).await.unwrap(), 1000);
}

#[test]
async fn connections_of_a_user_are_limited_and_others_are_not_affected() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("one", dns("one.test"), 2);
    certificates.sign("two", dns("two.test"), 3);
    let peers = ["--tls-peer", "one.test=1000", "--tls-peer", "two.test=1001"];
    let tcp = TcpService::start(&certificates, &[&peers[..], &["--max-sessions-per-user", "2"]].concat());
    let mut open = Vec::new();
    for _ in 0..2 {
        let client = tcp.connect(certificates.tls("one")).await.unwrap();
        assert_eq!(client.host_info().await.unwrap().caller_uid, 1000);
        open.push(client);
    }
    tcp.assert_closed(tcp.uid(certificates.tls("one")).await);
    assert!(tcp.logged(0, "refusing a TCP connection").contains("limit of 2"));
    assert_eq!(tcp.uid(certificates.tls("two")).await.unwrap(), 1001);
    open.clear();
    let began = Instant::now();
    while tcp.uid(certificates.tls("one")).await.is_err() {
        assert!(began.elapsed() < Duration::from_secs(60), "closed connections still count");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[test]
async fn connections_of_all_users_together_are_limited() {
    require(root());
    let certificates = Certificates::new("ours");
    let mut arguments = vec!["--max-sessions-per-user", "2", "--max-users-at-limit", "1"];
    let peers = [("one", "one.test=1000"), ("two", "two.test=1001"), ("administrator", "root.test=0")];
    for ((name, peer), serial) in peers.into_iter().zip(2..) {
        certificates.sign(name, dns(peer.split_once('=').unwrap().0), serial);
        arguments.extend(["--tls-peer", peer]);
    }
    let tcp = TcpService::start(&certificates, &arguments);
    let mut open = Vec::new();
    for _ in 0..2 {
        let client = tcp.connect(certificates.tls("one")).await.unwrap();
        assert_eq!(client.host_info().await.unwrap().caller_uid, 1000);
        open.push(client);
    }
    tcp.assert_closed(tcp.uid(certificates.tls("two")).await);
    let refused = tcp.logged(0, "refusing a TCP connection");
    assert!(refused.contains("all users together have 2 TCP connections"), "{refused}");
    assert_eq!(tcp.uid(certificates.tls("administrator")).await.unwrap(), 0);
}

#[test]
async fn flood_of_silent_connections_shuts_out_no_peer() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    let tcp = TcpService::start(&certificates, &["--tls-peer", "vmm.test=1000"]);
    let mut silent = Vec::new();
    for _ in 0..600 {
        silent.push(TcpStream::connect(("127.0.0.1", tcp.port)).await.unwrap());
    }
    let began = Instant::now();
    assert_eq!(tcp.uid(certificates.tls("vmm")).await.unwrap(), 1000);
    assert!(began.elapsed() < MAX_DELAY, "{:?}", began.elapsed());
    tcp.logged(0, "closing the oldest TCP connection without a TLS handshake");
    let after = closed_after(&mut silent[0]).await;
    assert!(after < SERVICE_TIMEOUT / 2, "the oldest was closed before its deadline: {after:?}");
}

#[test]
async fn service_stops_while_tcp_clients_are_connected() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    let mut tcp = TcpService::start(&certificates, &["--tls-peer", "vmm.test=1000"]);
    let client = tcp.connect(certificates.tls("vmm")).await.unwrap();
    let mut watch = client.watch().await.unwrap();
    watch.next().await.unwrap();
    let _silent = TcpStream::connect(("127.0.0.1", tcp.port)).await.unwrap();
    tcp.service.signal(Signal::SIGTERM);
    assert!(tcp.service.ended(Duration::from_secs(5)), "a watch delays the stop by the grace period only");
}

#[test(flavor = "multi_thread")]
async fn silent_connections_are_closed_at_their_deadline() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    let tcp = TcpService::start(&certificates, &["--tls-peer", "vmm.test=1000"]);
    let mut silent = TcpStream::connect(("127.0.0.1", tcp.port)).await.unwrap();
    let mut partial = TcpStream::connect(("127.0.0.1", tcp.port)).await.unwrap();
    // The header of a TLS record of 256 bytes.
    partial.write_all(&[22, 3, 1, 1, 0]).await.unwrap();
    let mut without_preface = handshake(&certificates, tcp.port, "vmm", &version::TLS13).await.unwrap();
    let mut half_preface = handshake(&certificates, tcp.port, "vmm", &version::TLS13).await.unwrap();
    half_preface.write_all(b"PRI * HTTP/2").await.unwrap();
    half_preface.flush().await.unwrap();
    let (silent, partial, without_preface, half_preface) = tokio::join!(
        closed_after(&mut silent),
        closed_after(&mut partial),
        closed_after(&mut without_preface),
        closed_after(&mut half_preface)
    );
    for after in [silent, partial, without_preface, half_preface] {
        let late = SERVICE_TIMEOUT + Duration::from_secs(60);
        assert!(after > SERVICE_TIMEOUT / 2 && after < late, "{after:?}");
    }
}
