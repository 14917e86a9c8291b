//! The mapping of client certificates to users.

use std::fmt;
use std::str::FromStr;

use tokio_rustls::rustls::pki_types::DnsName;
use x509_parser::error::X509Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::files::Caller;

/// A subject alternative name. A DNS name never equals a URI, whatever its text is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerName {
    /// In lower case: DNS names ignore case, RFC 5280 section 7.2.
    Dns(String),
    /// Compared byte by byte.
    Uri(String),
}

/// A subject alternative name and the user that it maps to: the value of `--tls-peer`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPeer {
    name: PeerName,
    uid: u32,
    gid: u32,
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

impl PeerName {
    /// A DNS name without wildcard.
    fn dns(name: &str) -> Result<Self, String> {
        DnsName::try_from(name).map_err(|_| format!("invalid DNS name {name:?}"))?;
        Ok(Self::Dns(name.to_ascii_lowercase()))
    }

    /// An absolute URI, RFC 3986: a scheme, a colon, and no character that a URI must encode.
    fn uri(name: &str) -> Result<Self, String> {
        let is_scheme = |scheme: &str| {
            scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
        };
        match name.split_once(':') {
            Some((scheme, rest)) if is_scheme(scheme) && rest.chars().all(|c| c.is_ascii_graphic()) => {
                Ok(Self::Uri(name.to_owned()))
            }
            _ => Err(format!("invalid URI {name:?}")),
        }
    }

    fn matches(&self, name: &GeneralName<'_>) -> bool {
        match (self, name) {
            (Self::Dns(own), GeneralName::DNSName(name)) => own.eq_ignore_ascii_case(name),
            (Self::Uri(own), GeneralName::URI(name)) => own == name,
            _ => false,
        }
    }
}

impl FromStr for PeerName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // No DNS name contains a colon, and every absolute URI does.
        match text.split_once(':') {
            Some(("dns", name)) => Self::dns(name),
            Some(("uri", name)) => Self::uri(name),
            Some(_) => Self::uri(text),
            None => Self::dns(text),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(name) => write!(formatter, "dns:{name}"),
            Self::Uri(name) => write!(formatter, "uri:{name}"),
        }
    }
}

impl FromStr for TlsPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ids) = text.rsplit_once('=').ok_or("missing '=' between name and user id")?;
        let (uid, gid) = ids.split_once(':').unwrap_or((ids, ids));
        Ok(Self { name: name.parse()?, uid: id(uid)?, gid: id(gid)? })
    }
}

impl fmt::Display for TlsPeer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}={}:{}", self.name, self.uid, self.gid)
    }
}

impl TlsPeer {
    #[must_use]
    pub const fn name(&self) -> &PeerName {
        &self.name
    }

    /// User and group.
    #[must_use]
    pub const fn ids(&self) -> (u32, u32) {
        (self.uid, self.gid)
    }
}

/// A user or group id. The largest number means "no id" in chown(2).
fn id(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(u32::MAX) => Err(format!("invalid id {text:?}: reserved")),
        Ok(id) => Ok(id),
        Err(error) => Err(format!("invalid id {text:?}: {error}")),
    }
}

impl Identities {
    /// # Errors
    /// The name that two peers map to different users.
    pub fn new(peers: Vec<TlsPeer>) -> Result<Self, PeerName> {
        for (index, peer) in peers.iter().enumerate() {
            if peers[..index].iter().any(|other| other.name == peer.name && other != peer) {
                return Err(peer.name.clone());
            }
        }
        Ok(Self { peers })
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
        let found = names.iter().find_map(|name| self.peers.iter().find(|peer| peer.name.matches(name)));
        let peer = found.ok_or_else(|| IdentityError::Unmapped(format!("{names:?}")))?;
        Ok(Caller { uid: peer.uid, gid: peer.gid, groups: Vec::new(), admin: peer.uid == 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> Result<TlsPeer, String> {
        text.parse()
    }

    fn identities(peers: &[&str]) -> Identities {
        Identities::new(peers.iter().map(|text| peer(text).unwrap()).collect()).unwrap()
    }

    /// A certificate with these subject alternative names, of any text.
    fn certificate(names: &[rcgen::SanType]) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names.to_vec();
        params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    fn dns(name: &str) -> rcgen::SanType {
        rcgen::SanType::DnsName(name.try_into().unwrap())
    }

    fn uri(name: &str) -> rcgen::SanType {
        rcgen::SanType::URI(name.try_into().unwrap())
    }

    #[test]
    fn peer_option_parses_into_name_and_ids() {
        let dns = |name: &str, uid, gid| TlsPeer { name: PeerName::Dns(name.to_owned()), uid, gid };
        let uri = |name: &str, uid, gid| TlsPeer { name: PeerName::Uri(name.to_owned()), uid, gid };
        for (text, parsed) in [
            ("vmm=7", dns("vmm", 7, 7)),
            ("dns:VMM.test=7:8", dns("vmm.test", 7, 8)),
            ("spiffe://host/vmm?a=b=7:8", uri("spiffe://host/vmm?a=b", 7, 8)),
            ("uri:spiffe://host/vmm=7", uri("spiffe://host/vmm", 7, 7)),
            ("uri:dns:vmm=7", uri("dns:vmm", 7, 7)),
        ] {
            assert_eq!(peer(text).as_ref(), Ok(&parsed), "{text}");
            assert_eq!(peer(&parsed.to_string()), Ok(parsed), "{text}");
        }
        for bad in [
            "vmm",
            "=7",
            "dns:=7",
            "uri:=7",
            "uri:vmm=7",
            "uri:a b:c=7",
            "uri:a:b c=7",
            "a/b=7",
            "dns:a:b=7",
            "*.vmm.test=7",
            "vmm=",
            "vmm=-1",
            "vmm=7:x",
            "vmm=4294967295",
        ] {
            assert!(peer(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn certificate_maps_to_the_user_of_its_name() {
        let identities = identities(&["vmm.test=1000:50"]);
        let caller = identities.caller(&certificate(&[dns("other.test"), dns("VMM.test")])).unwrap();
        assert_eq!((caller.uid, caller.gid, caller.admin), (1000, 50, false));
        let unmapped = identities.caller(&certificate(&[dns("other.test")])).unwrap_err();
        assert!(matches!(unmapped, IdentityError::Unmapped(_)), "{unmapped}");
        let malformed = identities.caller(b"no certificate").unwrap_err();
        assert!(matches!(malformed, IdentityError::Malformed(_)), "{malformed}");
    }

    #[test]
    fn dns_name_and_uri_of_the_same_text_are_different_peers() {
        let uri_peer = identities(&["spiffe://host/vmm=1", "uri:dns:vmm=2", "dns:vmm=3"]);
        let uid = |names: &[rcgen::SanType]| uri_peer.caller(&certificate(names)).map(|caller| caller.uid);
        assert_eq!(uid(&[uri("spiffe://host/vmm")]).ok(), Some(1));
        assert!(uid(&[dns("spiffe://host/vmm")]).is_err());
        assert_eq!(uid(&[uri("dns:vmm")]).ok(), Some(2));
        assert_eq!(uid(&[dns("vmm")]).ok(), Some(3));
        assert!(uid(&[dns("dns:vmm")]).is_err());
        assert!(uid(&[uri("vmm")]).is_err());
        assert!(uid(&[uri("SPIFFE://host/vmm")]).is_err(), "URIs are compared byte by byte");
    }

    #[test]
    fn name_that_maps_to_two_users_is_refused() {
        let peers = |texts: [&str; 2]| texts.map(|text| peer(text).unwrap()).to_vec();
        let conflict = Identities::new(peers(["vmm=1", "dns:VMM=2"])).unwrap_err();
        assert_eq!(conflict.to_string(), "dns:vmm");
        assert!(Identities::new(peers(["vmm=1", "dns:vmm=1:1"])).is_ok());
    }
}
