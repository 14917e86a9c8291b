//! The mapping of client certificates to users.

use std::str::FromStr;

use x509_parser::error::X509Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::files::Caller;

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

/// A client certificate maps to no user.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot parse the client certificate")]
    Malformed(#[source] x509_parser::nom::Err<X509Error>),
    #[error("cannot parse the subject alternative names of the client certificate")]
    Names(#[source] X509Error),
    #[error("no --tls-peer maps a name of the client certificate: {0}")]
    Unmapped(String),
}

impl Identities {
    #[must_use]
    pub const fn new(peers: Vec<TlsPeer>) -> Self {
        Self { peers }
    }

    /// The caller of a client certificate (DER), which the TLS layer has verified: the first of its names that is mapped
    /// decides. Only a peer that maps to root is an administrator: the user that the service runs as is not one over TCP.
    ///
    /// # Errors
    /// [`IdentityError`]
    pub fn caller(&self, certificate: &[u8]) -> Result<Caller, IdentityError> {
        let (_, certificate) = X509Certificate::from_der(certificate).map_err(IdentityError::Malformed)?;
        let names = certificate.subject_alternative_name().map_err(IdentityError::Names)?;
        let names = names.map_or(&[][..], |extension| &extension.value.general_names);
        let found = names.iter().find_map(|name| {
            let (GeneralName::DNSName(name) | GeneralName::URI(name)) = name else { return None };
            self.peers.iter().find(|peer| peer.name == *name)
        });
        let peer = found.ok_or_else(|| IdentityError::Unmapped(format!("{names:?}")))?;
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
        let caller = identities.caller(&certificate(&["other.test", "vmm.test"])).unwrap();
        assert_eq!((caller.uid, caller.gid, caller.admin), (1000, 50, false));
        assert!(identities.caller(&certificate(&["other.test"])).is_err());
        assert!(identities.caller(b"no certificate").is_err());
    }
}
