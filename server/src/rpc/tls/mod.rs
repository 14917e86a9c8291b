//! TLS for TCP: options, certificates, and the mapping of client certificates to users. TCP requires mutual TLS.

mod context;
mod identities;
mod revocation;

pub(super) use context::TlsContext;
pub use context::TlsError;
pub use identities::{Identities, IdentityError, PeerName, TlsPeer};

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// The TLS options of the command line.
#[derive(Args, Clone, Debug)]
pub struct TlsOptions {
    /// PEM file with the certificate chain of the service. SIGHUP reads this and the other TLS files again; if one is
    /// invalid, fdmapd logs an error and uses the previous ones
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the private key of the service
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_key: Option<PathBuf>,
    /// PEM file with the CA certificates that client certificates must chain to
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_client_ca: Option<PathBuf>,
    /// PEM file with certificate revocation lists. The service refuses clients with a revoked certificate, and clients
    /// with an issuer in their chain that has no current list here
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub tls_client_crl: Option<PathBuf>,
    /// Lowest TLS version that clients may use
    #[arg(long, value_enum, value_name = "VERSION", default_value_t, requires = "tcp")]
    pub tls_min_version: TlsVersion,
    /// Map a client certificate to a user: a client whose certificate has subject alternative name NAME acts as user UID
    /// and group GID [default: GID is UID]. dns:NAME is a DNS name, uri:NAME a URI. Without a prefix, NAME is a URI if it
    /// contains a colon, else a DNS name. Repeat the option for further clients. The service closes connections of
    /// clients without a mapping
    #[arg(long, value_name = "NAME=UID[:GID]", requires = "tcp")]
    pub tls_peer: Vec<TlsPeer>,
}

/// A TLS version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TlsVersion {
    #[value(name = "1.2")]
    Tls12,
    #[default]
    #[value(name = "1.3")]
    Tls13,
}
