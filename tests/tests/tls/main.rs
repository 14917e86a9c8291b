//! TCP with mutual TLS: identities, versions, revocation, reload.

mod connections;
mod floods;
mod tcp_service;

use std::time::Duration;

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::{CreateFile, ScanRequest, Tls, Watch};
use fdmap_client::{Client, ClientError};
use fdmap_tests::certificates::{Certificates, dns, uri};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;

use tcp_service::TcpService;

fn main() -> std::process::ExitCode {
    fdmap_tests::victim::main().unwrap_or_else(fdmap_tests::harness::main)
}

async fn create(client: &Client, name: &str) {
    let file = CreateFile { name: name.to_owned(), size_bytes: 40_960, ..CreateFile::default() };
    client.create(file).await.unwrap();
}

#[test]
async fn tcp_accepts_known_certificates_only() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    certificates.sign("stranger", dns("stranger.test"), 3);
    let tcp = TcpService::start(&certificates, &["--tls-peer", "vmm.test=1000"]);
    let vmm = tcp.connect(certificates.tls("vmm")).await.unwrap();
    assert_eq!(vmm.host_info().await.unwrap().caller_uid, 1000);
    create(&vmm, "theirs").await;
    let local = tcp.service.client().await.unwrap();
    create(&local, "roots").await;
    assert_eq!(vmm.list().await.unwrap().len(), 1, "user 1000 sees only its own files");
    for name in ["roots", "root/roots"] {
        let scan = vmm.scan(&named(name), &ScanRequest::default()).await;
        assert_eq!(scan.unwrap_err().refusal(), Some(RefusalCode::NotFound));
    }
    assert_eq!(vmm.scan(&named("theirs"), &ScanRequest::default()).await.unwrap().header().file_pages, 10);

    tcp.assert_closed(tcp.uid(certificates.tls("stranger")).await);
    assert!(tcp.logged(0, "refusing a TCP connection").contains("stranger.test"));
    let others = Certificates::new("others");
    others.sign("vmm", dns("vmm.test"), 2);
    let forged = Tls { ca: certificates.path("ca"), ..others.tls("vmm") };
    tcp.assert_closed(tcp.uid(forged).await);
}

#[test]
async fn tcp_without_certificates_is_refused_at_startup() {
    let error = Service::start(&["--tcp", "127.0.0.1:0"]).unwrap_err();
    assert!(fdmap_proto::error_chain(&error).contains("--tls-cert"), "{error}");
}

#[test]
fn tls_file_that_is_invalid_at_start_ends_the_service() {
    require(root());
    for file in ["service", "service.key", "ca", "crl"] {
        let certificates = Certificates::new("ours");
        let path = certificates.path(file);
        let path = path.to_str().unwrap();
        let mut options = vec!["--tls-peer", "vmm.test=1000"];
        if file == "crl" {
            // An expired list would refuse all clients.
            certificates.revoke(&[], 2021);
            options.extend(["--tls-client-crl", path]);
        } else {
            std::fs::write(path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        }
        let started = TcpService::try_start_by(&certificates, &options, Service::start);
        let error = fdmap_proto::error_chain(&started.err().expect(file));
        assert!(error.contains(path), "{file}: {error}");
    }
}

#[test]
async fn dns_name_does_not_match_a_uri() {
    require(root());
    let certificates = Certificates::new("ours");
    let id = "spiffe://host/vmm";
    certificates.sign("uri", uri(id), 2);
    certificates.sign("dns", dns(id), 3);
    let peer = format!("{id}=1000");
    let tcp = TcpService::start(&certificates, &["--tls-peer", &peer, "--tls-peer", "uri:dns:vmm=1001"]);
    assert_eq!(tcp.uid(certificates.tls("uri")).await.unwrap(), 1000);
    tcp.assert_closed(tcp.uid(certificates.tls("dns")).await);
    certificates.sign("other", dns("dns:vmm"), 4);
    tcp.assert_closed(tcp.uid(certificates.tls("other")).await);
}

/// A watch whose stream has begun.
async fn watch(client: &Client) -> Watch {
    let mut watch = client.watch().await.unwrap();
    watch.next().await.unwrap();
    watch
}

/// Waits until a watch fails.
async fn ended(watch: &mut Watch) -> ClientError {
    let failed = async {
        loop {
            match watch.next().await {
                Ok(Some(_)) => {}
                Ok(None) => return ClientError::Broken("end of the stream".to_owned()),
                Err(error) => return error,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), failed).await.expect("the connection ends")
}

#[test]
async fn revoked_certificate_is_refused_and_its_connections_end_at_the_reload() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("kept", dns("kept.test"), 2);
    certificates.sign("lost", dns("lost.test"), 3);
    certificates.sign("early", dns("kept.test"), 4);
    certificates.revoke(&[4], 2100);
    let crl = certificates.path("crl");
    let tcp = TcpService::start(
        &certificates,
        &[
            "--tls-peer",
            "kept.test=1000",
            "--tls-peer",
            "lost.test=1001",
            "--tls-client-crl",
            crl.to_str().unwrap(),
        ],
    );
    tcp.assert_closed(tcp.uid(certificates.tls("early")).await);
    assert!(tcp.logged(0, "refusing a TCP connection").contains("Revoked"));
    let kept = tcp.connect(certificates.tls("kept")).await.unwrap();
    let lost = tcp.connect(certificates.tls("lost")).await.unwrap();
    let (mut kept_watch, mut lost_watch) = (watch(&kept).await, watch(&lost).await);

    certificates.revoke(&[3, 4], 2100);
    let reloaded = tcp.reload("reloaded the TLS files");
    assert!(reloaded.contains("open=1 closed=1"), "{reloaded}");
    let error = ended(&mut lost_watch).await;
    assert!(matches!(error, ClientError::Broken(_)), "{error:?}");
    tcp.assert_closed(tcp.uid(certificates.tls("lost")).await);
    // On the same connection, so the event arrives.
    create(&kept, "later").await;
    kept_watch.next().await.unwrap().unwrap();

    // An expired list is refused as a whole.
    certificates.revoke(&[], 2021);
    let refused = tcp.reload("cannot reload");
    assert!(refused.contains(crl.to_str().unwrap()) && refused.contains("expired"), "{refused}");
    // So are lists of other authorities, which would refuse all clients.
    for (name, reason) in [("others", "no list of the authority CN=ours"), ("ours", "not signed by")] {
        let others = Certificates::new(name);
        others.revoke(&[], 2100);
        std::fs::copy(others.path("crl"), &crl).unwrap();
        let refused = tcp.reload("cannot reload");
        assert!(refused.contains(crl.to_str().unwrap()) && refused.contains(reason), "{refused}");
    }
    tcp.assert_closed(tcp.uid(certificates.tls("lost")).await);
    assert_eq!(tcp.uid(certificates.tls("kept")).await.unwrap(), 1000);
}

#[test]
async fn reload_replaces_certificates_and_ends_no_accepted_connection() {
    require(root());
    let certificates = Certificates::new("ours");
    certificates.sign("vmm", dns("vmm.test"), 2);
    let tcp = TcpService::start(&certificates, &["--tls-peer", "vmm.test=1000"]);
    let vmm = tcp.connect(certificates.tls("vmm")).await.unwrap();
    let mut events = watch(&vmm).await;

    // Files that cannot be used change nothing.
    let (key, certificate) = (certificates.path("service.key"), certificates.path("service"));
    let before = std::fs::read(&key).unwrap();
    for (path, text) in [(&key, "service.key"), (&certificate, "service"), (&certificates.path("ca"), "ca")] {
        let good = std::fs::read(path).unwrap();
        for bad in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            std::fs::write(path, bad).unwrap();
            let line = tcp.reload("cannot reload");
            assert!(line.contains(path.to_str().unwrap()), "{text}: {line}");
        }
        std::fs::remove_file(path).unwrap();
        let line = tcp.reload("cannot reload");
        assert!(line.contains(path.to_str().unwrap()) && line.contains("No such file"), "{text}: {line}");
        std::fs::write(path, good).unwrap();
    }
    // The key of another certificate.
    std::fs::write(&key, std::fs::read(certificates.path("vmm.key")).unwrap()).unwrap();
    let line = tcp.reload("cannot reload");
    assert!(line.contains(key.to_str().unwrap()) && line.contains(certificate.to_str().unwrap()), "{line}");
    std::fs::write(&key, before).unwrap();
    assert_eq!(tcp.uid(certificates.tls("vmm")).await.unwrap(), 1000);

    // Another authority signs the service; both authorities sign clients.
    let others = Certificates::new("others");
    others.sign("vmm", dns("vmm.test"), 2);
    tcp.assert_closed(tcp.uid(Tls { ca: certificates.path("ca"), ..others.tls("vmm") }).await);
    for file in ["service", "service.key"] {
        std::fs::copy(others.path(file), certificates.path(file)).unwrap();
    }
    let both = [&certificates, &others].map(|from| std::fs::read_to_string(from.path("ca")).unwrap());
    std::fs::write(certificates.path("ca"), both.concat()).unwrap();
    let line = tcp.reload("reloaded the TLS files");
    assert!(line.contains("open=1 closed=0"), "{line}");
    assert_eq!(tcp.uid(others.tls("vmm")).await.unwrap(), 1000);
    assert_eq!(tcp.uid(Tls { ca: others.path("ca"), ..certificates.tls("vmm") }).await.unwrap(), 1000);
    create(&vmm, "later").await;
    events.next().await.unwrap().unwrap();

    // The old authority is removed.
    std::fs::copy(others.path("ca"), certificates.path("ca")).unwrap();
    let line = tcp.reload("reloaded the TLS files");
    assert!(line.contains("closed=1"), "{line}");
    ended(&mut events).await;
    assert_eq!(tcp.uid(others.tls("vmm")).await.unwrap(), 1000);
}
