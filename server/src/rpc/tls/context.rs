//! The TLS files of the service, read and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use tokio_rustls::rustls::{Error, RootCertStore, ServerConfig, version};

use super::{PeerName, TlsOptions, TlsVersion, revocation};

/// The protocol that gRPC clients negotiate (ALPN).
const HTTP_2: &[u8] = b"h2";

/// What the TLS files say at one time. A reload makes a new one.
pub(in crate::rpc) struct TlsContext {
    acceptor: TlsAcceptor,
    verifier: Arc<dyn ClientCertVerifier>,
}

/// TLS cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("--tcp requires {0}: TCP clients are identified by mutual TLS")]
    Missing(&'static str),
    #[error("--tls-peer maps {0} to two users")]
    Conflict(PeerName),
    #[error("reading {path}")]
    Read {
        path: PathBuf,
        #[source]
        error: std::io::Error,
    },
    #[error("parsing {path}")]
    Pem {
        path: PathBuf,
        #[source]
        error: pem::Error,
    },
    #[error("{path} contains no {content}")]
    Empty { path: PathBuf, content: &'static str },
    #[error("using certificate {certificate} with key {key}")]
    Certificate {
        certificate: PathBuf,
        key: PathBuf,
        #[source]
        error: Error,
    },
    #[error("using CA certificates {path}")]
    Authority {
        path: PathBuf,
        #[source]
        error: Error,
    },
    #[error("using revocation lists {path}: {reason}")]
    RevocationList { path: PathBuf, reason: String },
    #[error("using CA certificates {authority} and revocation lists {revocation_lists:?}")]
    Verifier {
        authority: PathBuf,
        revocation_lists: Option<PathBuf>,
        #[source]
        error: VerifierBuilderError,
    },
    #[error("configuring TLS versions")]
    Versions(#[source] Error),
}

impl TlsContext {
    /// Reads the TLS files.
    ///
    /// # Errors
    /// [`TlsError`]
    pub(in crate::rpc) fn load(options: &TlsOptions) -> Result<Self, TlsError> {
        let required = |path: &'_ Option<PathBuf>, option| path.clone().ok_or(TlsError::Missing(option));
        let certificate_path = required(&options.tls_cert, "--tls-cert")?;
        let key_path = required(&options.tls_key, "--tls-key")?;
        let authority_path = required(&options.tls_client_ca, "--tls-client-ca")?;
        let chain = objects(&certificate_path, "certificate")?;
        let key = objects::<PrivateKeyDer<'static>>(&key_path, "private key")?.swap_remove(0);
        let provider = Arc::new(ring::default_provider());
        let verifier = verifier(&authority_path, options.tls_client_crl.as_deref(), &provider)?;
        let versions = match options.tls_min_version {
            TlsVersion::Tls12 => &[&version::TLS13, &version::TLS12][..],
            TlsVersion::Tls13 => &[&version::TLS13],
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(TlsError::Versions)?
            .with_client_cert_verifier(Arc::clone(&verifier))
            .with_single_cert(chain, key)
            .map_err(|error| TlsError::Certificate { certificate: certificate_path, key: key_path, error })?;
        config.alpn_protocols = vec![HTTP_2.to_vec()];
        // A resumed session would not verify the client certificate again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), verifier })
    }

    pub(in crate::rpc) fn acceptor(&self) -> TlsAcceptor {
        self.acceptor.clone()
    }

    /// Verifies the certificate chain of a client, its own certificate first, as a handshake does.
    ///
    /// # Errors
    /// The reason to refuse it.
    pub(in crate::rpc) fn verify(&self, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
        let (certificate, intermediates) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.verifier.verify_client_cert(certificate, intermediates, UnixTime::now()).map(drop)
    }
}

fn verifier(
    authority: &Path,
    revocation_lists: Option<&Path>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    let authorities = objects::<CertificateDer<'static>>(authority, "certificate")?;
    for certificate in authorities.iter().cloned() {
        let failed = |error| TlsError::Authority { path: authority.to_owned(), error };
        roots.add(certificate).map_err(failed)?;
    }
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
    if let Some(path) = revocation_lists {
        let lists = objects(path, "certificate revocation list")?;
        revocation::check(&authorities, &lists)
            .map_err(|reason| TlsError::RevocationList { path: path.to_owned(), reason })?;
        // An attacker who can delay the replacement of a list must not gain by it.
        builder = builder.with_crls(lists).enforce_revocation_expiration();
    }
    builder.build().map_err(|error| TlsError::Verifier {
        authority: authority.to_owned(),
        revocation_lists: revocation_lists.map(Path::to_owned),
        error,
    })
}

/// The objects of one kind in a PEM file: at least one.
fn objects<T: PemObject>(path: &Path, content: &'static str) -> Result<Vec<T>, TlsError> {
    let text = fs::read(path).map_err(|error| TlsError::Read { path: path.to_owned(), error })?;
    let objects: Result<Vec<_>, _> = T::pem_slice_iter(&text).collect();
    let objects = objects.map_err(|error| TlsError::Pem { path: path.to_owned(), error })?;
    if objects.is_empty() {
        return Err(TlsError::Empty { path: path.to_owned(), content });
    }
    Ok(objects)
}
