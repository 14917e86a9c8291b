//! Floods of TCP connections of peers that the service does not know: they delay neither local users nor known peers.

use std::sync::Arc;
use std::time::Instant;

use fdmap_tests::attack::{assert_withstands, assert_withstands_without_descriptors, service};
use fdmap_tests::certificates::{Certificates, dns};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::test;
use fdmap_tests::victim::MAX_DELAY;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio_rustls::rustls::version;

use super::connections::handshake;
use super::tcp_service::{TcpService, connect};

/// Silent connections: more than the service has handshakes in progress.
const SILENT: usize = 600;
/// More than the service has free descriptors, where a test limits these.
const EXHAUSTING: usize = 128;
/// Tasks that complete one handshake after the other, by a certificate that maps to no user.
const UNKNOWN_PEERS: usize = 4;
/// Calls of a known peer.
const CALLS: usize = 5;

/// A known peer connects and makes a call, as often as [`CALLS`].
async fn assert_peer_served(certificates: &Certificates, port: u16, moment: &str) {
    for _ in 0..CALLS {
        let began = Instant::now();
        let client = connect(port, certificates.tls("vmm")).await.unwrap();
        assert_eq!(client.host_info().await.unwrap().caller_uid, 1000);
        assert!(began.elapsed() < MAX_DELAY, "{moment}: {:?}", began.elapsed());
    }
}

/// Begins both floods, which last until the connections and the tasks are dropped.
async fn attack(certificates: &Arc<Certificates>, port: u16) -> (Vec<TcpStream>, JoinSet<()>) {
    assert_peer_served(certificates, port, "before the attack").await;
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    }
    let (mut unknown, (begun, mut first)) = (JoinSet::new(), tokio::sync::mpsc::channel(1));
    for _ in 0..UNKNOWN_PEERS {
        let (certificates, begun) = (Arc::clone(certificates), begun.clone());
        unknown.spawn(async move {
            loop {
                // The service closes it at once. It may be stopped meanwhile.
                if handshake(&certificates, port, "unknown", &version::TLS13).await.is_ok() {
                    let _ = begun.try_send(());
                }
            }
        });
    }
    first.recv().await.unwrap();
    assert_peer_served(certificates, port, "during the attack").await;
    (silent, unknown)
}

#[test(flavor = "multi_thread")]
async fn floods_of_unknown_peers_delay_no_user_and_leave_nothing() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    certificates.sign("unknown", dns("unknown.test"), 3);
    let certificates = Arc::new(certificates);
    let mut tcp = TcpService::start_by(&certificates, &["--tls-peer", "vmm.test=1000"], service);
    let port = tcp.port;
    tokio::task::block_in_place(|| {
        assert_withstands(&mut tcp.service, |_| Handle::current().block_on(attack(&certificates, port)));
        Handle::current().block_on(assert_peer_served(&certificates, port, "after the restart"));
    });
    assert!(tcp.service.log().contains("refusing a TCP connection"), "{}", tcp.service.log());
}

/// No user is served until these connections end: each call begins with a connection.
#[test]
fn service_without_free_descriptors_pauses_the_accept_of_tcp_connections() {
    require(root());
    let certificates = Certificates::new("ours");
    let mut tcp = TcpService::start_by(&certificates, &["--tls-peer", "vmm.test=1000"], service);
    let port = tcp.port;
    assert_withstands_without_descriptors(&mut tcp.service, "cannot accept a TCP connection", |_| {
        let connect = |_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        (0..EXHAUSTING).map(connect).collect::<Vec<_>>()
    });
}
