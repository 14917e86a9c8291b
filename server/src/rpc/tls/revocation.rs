//! Certificate revocation lists: checks before they are used. Lists that would refuse all clients are refused themselves, so that
//! those before them stay in use.

use tokio_rustls::rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::error::X509Error;
use x509_parser::prelude::{ASN1Time, CertificateRevocationList, FromDer as _, X509Certificate};

/// Checks that all lists are current, and that each authority has one.
///
/// # Errors
/// What is wrong, for a message.
pub(super) fn check(
    authorities: &[CertificateDer<'_>],
    lists: &[CertificateRevocationListDer<'_>],
) -> Result<(), String> {
    let parsed = lists.iter().map(|list| CertificateRevocationList::from_der(list).map(|(_, list)| list));
    let lists: Result<Vec<_>, _> = parsed.collect();
    let lists = lists.map_err(|error| error.to_string())?;
    lists.iter().try_for_each(check_is_current)?;
    for authority in authorities {
        let (_, authority) = X509Certificate::from_der(authority).map_err(|error| error.to_string())?;
        check_has_list(&authority, &lists)?;
    }
    Ok(())
}

fn check_is_current(list: &CertificateRevocationList<'_>) -> Result<(), String> {
    match list.next_update() {
        Some(next_update) if next_update < ASN1Time::now() => {
            Err(format!("the list of {} expired at {next_update}", list.issuer()))
        }
        Some(_) => Ok(()),
        None => Err(format!("the list of {} does not name the time of the next one", list.issuer())),
    }
}

/// Clients of an authority without a list are refused.
fn check_has_list(
    authority: &X509Certificate<'_>,
    lists: &[CertificateRevocationList<'_>],
) -> Result<(), String> {
    let name = authority.subject();
    let mut named = lists.iter().filter(|list| list.issuer().as_raw() == name.as_raw()).peekable();
    if named.peek().is_none() {
        return Err(format!("there is no list of the authority {name}"));
    }
    // rustls may know signature algorithms that are unknown here.
    let is_foreign = |list: &CertificateRevocationList<'_>| {
        list.verify_signature(authority.public_key()) == Err(X509Error::SignatureVerificationError)
    };
    if named.all(is_foreign) {
        return Err(format!("the list of {name} is not signed by the authority of this name"));
    }
    Ok(())
}
