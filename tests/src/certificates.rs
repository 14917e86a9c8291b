//! A certificate authority, and the certificates that it signed.

use std::path::PathBuf;

use fdmap_client::grpc::Tls;
use rcgen::{CertificateParams, CertificateRevocationListParams, RevokedCertParams, SanType, SerialNumber};

/// The certificates are files in a directory: NAME and NAME.key.
#[derive(Debug)]
pub struct Certificates {
    folder: tempfile::TempDir,
    authority: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
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
}
