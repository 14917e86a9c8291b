//! Values of `--tls-peer`, and the names of client certificates.

use std::sync::OnceLock;

use arbitrary::{Arbitrary, Unstructured};
use fdmap_server::rpc::{Identities, PeerName, TlsPeer};
use rcgen::{CertificateParams, KeyPair, SanType};

use crate::draft::{rare, up_to};

/// Names that match each other by case or text, and names that only look alike.
const NAMES: [&str; 9] =
    ["vmm", "VMM", "a.test", "A.test", "spiffe://host/vmm", "SPIFFE://host/vmm", "dns:vmm", "uri:vmm", "x:y"];

#[derive(Arbitrary, Debug)]
pub enum Input {
    /// The value of a `--tls-peer`.
    Value(String),
    /// Some of them, and a certificate with some names.
    Names {
        #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 8))]
        peers: Vec<Peer>,
        #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 8))]
        names: Vec<Name>,
        /// Bytes of the certificate that are replaced: position and value.
        changed: Option<(u16, u8)>,
    },
    /// Any bytes in place of a certificate.
    Certificate(Vec<u8>),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Peer {
    name: u8,
    kind: Kind,
    uid: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Kind {
    Plain,
    Dns,
    Uri,
}

#[derive(Arbitrary, Clone, Debug)]
pub struct Name {
    name: u8,
    #[arbitrary(with = rare)]
    any: Option<String>,
    san: San,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum San {
    Dns,
    Uri,
    Mail,
}

fn name(nth: u8) -> &'static str {
    NAMES[usize::from(nth) % NAMES.len()]
}

/// # Panics
/// If a check fails.
pub fn run(input: Input) {
    match input {
        Input::Value(text) => value(&text),
        Input::Certificate(bytes) => {
            let peers = NAMES.iter().filter_map(|name| format!("{name}=7").parse().ok()).collect();
            check_found(&Identities::new(peers).unwrap(), &bytes);
        }
        Input::Names { peers, names, changed } => certificate(&peers, &names, changed),
    }
}

/// An accepted value has a name of its kind and usable ids, and is accepted again in its canonical form.
fn value(text: &str) {
    let Ok(peer) = text.parse::<TlsPeer>() else { return };
    assert_eq!(peer.to_string().parse().as_ref(), Ok(&peer), "{text:?}");
    let (uid, gid) = peer.ids();
    assert!(uid != u32::MAX && gid != u32::MAX, "{text:?} has a reserved id");
    match peer.name() {
        PeerName::Dns(name) => {
            let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._".contains(c);
            assert!(
                name.chars().all(is_valid) && (1..=253).contains(&name.trim_end_matches('.').len()),
                "{name:?}"
            );
            assert!(!text.starts_with("uri:"), "{text:?}");
        }
        PeerName::Uri(name) => {
            assert!(name.contains(':') && name.chars().all(|c| c.is_ascii_graphic()), "{name:?}");
            assert!(text.contains(name.as_str()) && !text.starts_with("dns:"), "{text:?}");
        }
    }
}

/// The user of a certificate is that of its first name that a peer of the same kind has.
fn certificate(drafts: &[Peer], names: &[Name], changed: Option<(u16, u8)>) {
    let text = |peer: &Peer| {
        let prefix = match peer.kind {
            Kind::Plain => "",
            Kind::Dns => "dns:",
            Kind::Uri => "uri:",
        };
        format!("{prefix}{}={}", name(peer.name), peer.uid)
    };
    let peers: Vec<TlsPeer> = drafts.iter().filter_map(|draft| text(draft).parse().ok()).collect();
    let is_conflict = |(at, peer): (usize, &TlsPeer)| {
        peers[..at].iter().any(|other| other.name() == peer.name() && other.ids() != peer.ids())
    };
    let conflict = peers.iter().enumerate().any(is_conflict);
    let identities = Identities::new(peers.clone());
    assert_eq!(identities.is_err(), conflict, "{peers:?}");
    let Ok(identities) = identities else { return };

    let texts: Vec<_> =
        names.iter().map(|draft| (draft.san, draft.any.as_deref().unwrap_or(name(draft.name)))).collect();
    let Some(mut bytes) = der(&texts) else { return };
    if let Some((at, byte)) = changed {
        let at = usize::from(at) % bytes.len();
        bytes[at] = byte;
        check_found(&identities, &bytes);
        return;
    }
    let is_of = |peer: &TlsPeer, san: San, text: &str| match (peer.name(), san) {
        (PeerName::Dns(own), San::Dns) => own.eq_ignore_ascii_case(text),
        (PeerName::Uri(own), San::Uri) => own == text,
        _ => false,
    };
    let expected = texts
        .iter()
        .find_map(|(san, text)| peers.iter().find(|peer| is_of(peer, *san, text)).map(TlsPeer::ids));
    let caller = identities.caller(&bytes).ok();
    assert_eq!(caller.as_ref().map(|caller| (caller.uid, caller.gid)), expected, "{peers:?} {texts:?}");
    assert!(caller.is_none_or(|caller| caller.admin == (caller.uid == 0)));
}

/// If a certificate of any bytes maps to a user, it contains the name of a peer.
fn check_found(identities: &Identities, bytes: &[u8]) {
    if identities.caller(bytes).is_ok() {
        let contains =
            |name: &&str| bytes.windows(name.len()).any(|text| text.eq_ignore_ascii_case(name.as_bytes()));
        // Of "dns:vmm" and "uri:vmm", the prefix is not part of the name.
        assert!(
            NAMES.iter().any(|name| contains(name) || contains(&&name[4.min(name.len() - 1)..])),
            "{bytes:02x?}"
        );
    }
}

/// A certificate with these names; `None` if they cannot be encoded.
fn der(names: &[(San, &str)]) -> Option<Vec<u8>> {
    static KEY: OnceLock<KeyPair> = OnceLock::new();
    let mut params = CertificateParams::new(Vec::new()).ok()?;
    for (san, text) in names {
        params.subject_alt_names.push(match san {
            San::Dns => SanType::DnsName((*text).try_into().ok()?),
            San::Uri => SanType::URI((*text).try_into().ok()?),
            San::Mail => SanType::Rfc822Name((*text).try_into().ok()?),
        });
    }
    let key = KEY.get_or_init(|| KeyPair::generate().unwrap());
    Some(params.self_signed(key).ok()?.der().to_vec())
}
