//! TLS for TCP: certificates, and the mapping of client certificates to users. TCP requires mutual TLS.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::files::Caller;

/// The TLS options of the command line.
#[derive(Args, Clone, Debug)]
pub struct TlsFiles {
    /// PEM file with the certificate chain of the service
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the private key of the service
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_key: Option<PathBuf>,
    /// PEM file with the CA certificate that client certificates must chain to
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_client_ca: Option<PathBuf>,
    /// Map a client certificate to a user: a client whose certificate has subject alternative name NAME (DNS or URI) acts as
    /// user UID and group GID [default: GID is UID]. Repeat the option for further clients. The service refuses clients
    /// without a mapping
    #[arg(long, value_name = "NAME=UID[:GID]", requires = "tcp")]
    pub tls_peer: Vec<TlsPeer>,
}

/// TLS cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("--tcp requires {0}: TCP clients are identified by mutual TLS")]
    Missing(&'static str),
    #[error("reading {path}")]
    Read {
        path: PathBuf,
        #[source]
        error: std::io::Error,
    },
}

impl TlsFiles {
    /// Reads the certificates and the key.
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

/// A subject alternative name and the user that it maps to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPeer {
    name: String,
    uid: u32,
    gid: u32,
}

impl FromStr for TlsPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ids) = text.rsplit_once('=').ok_or("missing '=' between name and user id")?;
        let (uid, gid) = ids.split_once(':').unwrap_or((ids, ids));
        let id = |text: &str| text.parse::<u32>().map_err(|error| format!("invalid id {text:?}: {error}"));
        if name.is_empty() {
            return Err("empty name".to_owned());
        }
        Ok(Self { name: name.to_owned(), uid: id(uid)?, gid: id(gid)? })
    }
}

/// The mapping of client certificates to users.
#[derive(Debug, Default)]
pub struct Identities {
    peers: Vec<TlsPeer>,
}

impl Identities {
    #[must_use]
    pub const fn new(peers: Vec<TlsPeer>) -> Self {
        Self { peers }
    }

    /// The caller of a client certificate, which the TLS layer has verified. Only a peer that maps to root is an administrator:
    /// the user that the service runs as is not one over TCP.
    ///
    /// # Errors
    /// A message for the client, if the certificate maps to no user.
    pub fn caller(&self, certificate: Option<&[u8]>) -> Result<Caller, String> {
        let certificate = certificate.ok_or("the client sent no certificate")?;
        let (_, certificate) = X509Certificate::from_der(certificate)
            .map_err(|error| format!("cannot parse the client certificate: {error}"))?;
        let names = certificate.subject_alternative_name().map_err(|error| {
            format!("cannot parse the subject alternative names of the client certificate: {error}")
        })?;
        let names = names.map_or(&[][..], |extension| &extension.value.general_names);
        let found = names.iter().find_map(|name| {
            let (GeneralName::DNSName(name) | GeneralName::URI(name)) = name else { return None };
            self.peers.iter().find(|peer| peer.name == *name)
        });
        let peer =
            found.ok_or_else(|| format!("no --tls-peer maps a name of the client certificate: {names:?}"))?;
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
    fn peer_option_parses_into_name_and_ids() {
        let peer = |text: &str| text.parse::<TlsPeer>();
        assert_eq!(peer("vmm=7"), Ok(TlsPeer { name: "vmm".to_owned(), uid: 7, gid: 7 }));
        let uri = "spiffe://host/vmm?a=b=7:8";
        assert_eq!(peer(uri), Ok(TlsPeer { name: "spiffe://host/vmm?a=b".to_owned(), uid: 7, gid: 8 }));
        for bad in ["vmm", "=7", "vmm=", "vmm=-1", "vmm=7:x"] {
            assert!(peer(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn certificate_maps_to_the_user_of_its_name() {
        let identities = Identities::new(vec!["vmm.test=1000:50".parse().unwrap()]);
        let caller = identities.caller(Some(&certificate(&["other.test", "vmm.test"]))).unwrap();
        assert_eq!((caller.uid, caller.gid, caller.admin), (1000, 50, false));
        assert!(identities.caller(Some(&certificate(&["other.test"]))).is_err());
        assert!(identities.caller(Some(b"no certificate")).is_err());
        assert!(identities.caller(None).is_err());
    }
}
