//! gRPC: thin handlers that decode, ask and stream, and the one place where errors become status codes. It decides nothing.

mod files;
mod host;
mod pages;
mod peer;
mod server;
mod status;
mod tls;
mod tracking;

pub use peer::{PeerInfo, PeerStream};
#[cfg(test)]
pub(crate) use server::MAX_REQUEST;
pub use server::{Listeners, ServeError, serve};
pub(crate) use status::Coded;
pub use tls::{Identities, TlsError, TlsFiles, TlsPeer};

use std::sync::Arc;

use tonic::{Request, Status};

use crate::files::Caller;
use crate::service::Service;

/// The handlers of all services.
#[derive(Clone)]
struct Rpc {
    service: Arc<Service>,
    identities: Arc<Identities>,
}

impl Rpc {
    fn caller<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        peer::caller(request.extensions(), &self.identities)
    }

    /// Runs what may take long, such as freeing the pages of a large file, where it holds up nobody else.
    async fn blocking<T, E>(
        &self,
        work: impl FnOnce(&Service) -> Result<T, E> + Send + 'static,
    ) -> Result<T, Status>
    where
        T: Send + 'static,
        E: Send + 'static,
        Status: From<status::Failure<E>>,
    {
        let service = Arc::clone(&self.service);
        match tokio::task::spawn_blocking(move || work(&service)).await {
            Ok(result) => result.map_err(|error| status::Failure(error).into()),
            Err(error) => Err(Status::internal(format!("the call ended without a result: {error}"))),
        }
    }
}
