//! TCP with mutual TLS: identities, versions, limits, deadlines.

mod certificates;
mod connections;

use fdmap_client::Client;
use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::{CreateFile, ScanRequest, Tls};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;

use certificates::{Certificates, dns, uri};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
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
    let tcp = certificates.service(&["--tls-peer", "vmm.test=1000"]);
    let vmm = tcp.connect(certificates.tls("vmm")).await.unwrap();
    assert_eq!(vmm.host_info().await.unwrap().caller_uid, 1000);
    create(&vmm, "theirs").await;
    let local = tcp.service.client().await.unwrap();
    create(&local, "roots").await;
    assert_eq!(vmm.list().await.unwrap().len(), 1, "user 1000 sees only its own files");
    let scan = vmm.scan(&named("roots"), &ScanRequest::default()).await;
    assert_eq!(scan.unwrap_err().refusal(), Some(RefusalCode::PermissionDenied));
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
async fn dns_name_does_not_match_a_uri() {
    require(root());
    let certificates = Certificates::new("ours");
    let id = "spiffe://host/vmm";
    certificates.sign("uri", uri(id), 2);
    certificates.sign("dns", dns(id), 3);
    let peer = format!("{id}=1000");
    let tcp = certificates.service(&["--tls-peer", &peer, "--tls-peer", "uri:dns:vmm=1001"]);
    assert_eq!(tcp.uid(certificates.tls("uri")).await.unwrap(), 1000);
    tcp.assert_closed(tcp.uid(certificates.tls("dns")).await);
    certificates.sign("other", dns("dns:vmm"), 4);
    tcp.assert_closed(tcp.uid(certificates.tls("other")).await);
}
