//! TCP, which is there with mutual TLS only: certificates, and the users that they stand for.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::files::Caller;

/// Where the certificates are, in PEM.
#[derive(Args, Clone, Debug)]
pub struct TlsFiles {
    /// The service's certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_cert: Option<PathBuf>,
    /// The service's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_key: Option<PathBuf>,
    /// The authority that signs clients' certificates, PEM
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_client_ca: Option<PathBuf>,
    /// Treat the client whose certificate has this subject alternative name (DNS or URI) as this user; may be given
    /// several times. Clients without one are refused
    #[arg(long, value_name = "NAME=UID[:GID]", requires = "tcp")]
    pub tls_peer: Vec<TlsPeer>,
}

/// Why TCP cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// An option is missing.
    #[error("--tcp needs {0}: without mutual TLS nobody would be known")]
    Missing(&'static str),
    /// A file cannot be read.
    #[error("reading {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        error: std::io::Error,
    },
}

impl TlsFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`]
    pub fn config(&self) -> Result<ServerTlsConfig, TlsError> {
        let read = |path: &Option<PathBuf>, option| {
            let path = path.as_ref().ok_or(TlsError::Missing(option))?;
            std::fs::read(path).map_err(|error| TlsError::Read { path: path.clone(), error })
        };
        let certificate = read(&self.tls_cert, "--tls-cert")?;
        let key = read(&self.tls_key, "--tls-key")?;
        let authority = read(&self.tls_client_ca, "--tls-client-ca")?;
        if self.tls_peer.is_empty() {
            return Err(TlsError::Missing("--tls-peer"));
        }
        Ok(ServerTlsConfig::new()
            .identity(Identity::from_pem(certificate, key))
            .client_ca_root(Certificate::from_pem(authority))
            .client_auth_optional(false))
    }
}

/// A certificate's name and the user it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPeer {
    name: String,
    uid: u32,
    gid: u32,
}

impl FromStr for TlsPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ids) = text.rsplit_once('=').ok_or("it has no '='")?;
        let (uid, gid) = ids.split_once(':').unwrap_or((ids, ids));
        let id = |text: &str| text.parse::<u32>().map_err(|error| format!("{text:?} is no id: {error}"));
        if name.is_empty() {
            return Err("the name is empty".to_owned());
        }
        Ok(Self { name: name.to_owned(), uid: id(uid)?, gid: id(gid)? })
    }
}

/// The users behind certificates.
#[derive(Debug, Default)]
pub struct Identities {
    peers: Vec<TlsPeer>,
}

impl Identities {
    /// These and no others.
    #[must_use]
    pub const fn new(peers: Vec<TlsPeer>) -> Self {
        Self { peers }
    }

    /// The user that a certificate, which the authority signed, stands for. Nobody comes to be the service's own user
    /// over TCP by accident: only a peer that is mapped to root is an administrator.
    ///
    /// # Errors
    /// Why it stands for nobody.
    pub fn caller(&self, certificate: Option<&[u8]>) -> Result<Caller, String> {
        let certificate = certificate.ok_or("the client has no certificate")?;
        let (_, certificate) = X509Certificate::from_der(certificate)
            .map_err(|error| format!("the client's certificate cannot be read: {error}"))?;
        let names = certificate
            .subject_alternative_name()
            .map_err(|error| format!("the names of the client's certificate cannot be read: {error}"))?;
        let names = names.map_or(&[][..], |extension| &extension.value.general_names);
        let found = names.iter().find_map(|name| {
            let (GeneralName::DNSName(name) | GeneralName::URI(name)) = name else { return None };
            self.peers.iter().find(|peer| peer.name == *name)
        });
        let peer = found.ok_or_else(|| format!("no user is set for the client's names {names:?}"))?;
        Ok(Caller { uid: peer.uid, gid: peer.gid, groups: Vec::new(), admin: peer.uid == 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(names: &[&str]) -> Vec<u8> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        rcgen::generate_simple_self_signed(names).unwrap().cert.der().to_vec()
    }

    #[test]
    fn peers_are_parsed() {
        let peer = |text: &str| text.parse::<TlsPeer>();
        assert_eq!(peer("vmm=7"), Ok(TlsPeer { name: "vmm".to_owned(), uid: 7, gid: 7 }));
        let uri = "spiffe://host/vmm?a=b=7:8";
        assert_eq!(peer(uri), Ok(TlsPeer { name: "spiffe://host/vmm?a=b".to_owned(), uid: 7, gid: 8 }));
        for bad in ["vmm", "=7", "vmm=", "vmm=-1", "vmm=7:x"] {
            assert!(peer(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn certificate_stands_for_the_user_its_name_is_mapped_to() {
        let identities = Identities::new(vec!["vmm.test=1000:50".parse().unwrap()]);
        let caller = identities.caller(Some(&certificate(&["other.test", "vmm.test"]))).unwrap();
        assert_eq!((caller.uid, caller.gid, caller.admin), (1000, 50, false));
        assert!(identities.caller(Some(&certificate(&["other.test"]))).is_err());
        assert!(identities.caller(Some(b"no certificate")).is_err());
        assert!(identities.caller(None).is_err());
    }
}
