//! The gRPC services: thin handlers that decode a request, call the layer below, and encode its answer. They decide nothing.
//! Errors become status codes in `status`.

mod body_layer;
mod buffers;
mod changes;
mod connection;
mod files;
mod host;
mod pages;
mod peer;
mod server;
mod stream;
mod tcp;
mod tls;
mod tracking;
mod unix;
mod unreceived;
mod unsent;

pub use peer::{PeerInfo, PeerStream};
#[cfg(test)]
pub(crate) use server::MAX_REQUEST_BYTES;
pub use server::{Listeners, ServeError, serve};
pub use tcp::{TcpConfig, TcpError, TcpServer};
pub use tls::{Identities, IdentityError, PeerName, TlsError, TlsOptions, TlsPeer, TlsVersion};
pub(crate) use unix::Closers;

use std::sync::Arc;

use fdmap_proto::convert::{ConvertError, FileName};
use fdmap_proto::file::Right;
use fdmap_proto::units::FileId;
use fdmap_proto::v1;
use tonic::{Request, Status};

use crate::blocking::Call;
use crate::files::{Caller, FileError, QuotaPermit, ServiceFile};
use crate::query::QueryError;
use crate::service::Service;
use crate::status::{GrpcCode, status};

/// The handlers of all services.
#[derive(Clone)]
struct Rpc {
    service: Arc<Service>,
}

impl Rpc {
    fn caller<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        peer::caller(request.extensions())
    }

    /// Charges the caller for a stream until the permit is dropped.
    fn stream(&self, caller: &Caller) -> Result<QuotaPermit, Status> {
        self.service.streams.acquire(caller, 1).map_err(status)
    }

    /// Finds the file of a request, if the caller has `right` to it.
    fn file(
        &self,
        caller: &Caller,
        file: Option<v1::FileRef>,
        right: Right,
    ) -> Result<Arc<ServiceFile>, Status> {
        let name = decoded(FileName::try_from(file))?;
        self.service.registry.find(caller, &name, right).map_err(status)
    }

    /// Runs work that may block, such as freeing the pages of a large file, outside the async worker threads.
    async fn blocking<T, E>(
        &self,
        caller: &Caller,
        call: Call,
        work: impl FnOnce(&Arc<Service>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, Status>
    where
        T: Send + 'static,
        E: GrpcCode + Send + 'static,
    {
        let service = Arc::clone(&self.service);
        let ran = self.service.blocking.run(caller, call, move || work(&service)).await;
        ran.map_err(status)?.map_err(status)
    }

    /// Runs work on the generations of a file, when it is the turn of this call, if the caller still has `right` to the file then.
    async fn on_file<T, E>(
        &self,
        caller: &Caller,
        operation: &'static str,
        file: &ServiceFile,
        right: Right,
        work: impl FnOnce(&Arc<Service>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, Status>
    where
        T: Send + 'static,
        E: GrpcCode + Send + 'static,
    {
        self.permitted(caller, Call::on(operation, file), file.id(), right, work).await
    }

    /// Runs work about a file, if the caller still has `right` to it then.
    async fn permitted<T, E>(
        &self,
        caller: &Caller,
        call: Call,
        file: FileId,
        right: Right,
        work: impl FnOnce(&Arc<Service>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, Status>
    where
        T: Send + 'static,
        E: GrpcCode + Send + 'static,
    {
        let (service, by) = (Arc::clone(&self.service), caller.clone());
        let permitted = move || {
            service.registry.find(&by, &FileName::Id(file), right)?;
            Ok::<_, FileError>(work(&service))
        };
        let ran = self.service.blocking.run(caller, call, permitted).await;
        ran.map_err(status)?.map_err(status)?.map_err(status)
    }
}

/// The status of a failed conversion from a wire type.
fn decoded<T>(value: Result<T, ConvertError>) -> Result<T, Status> {
    value.map_err(|error| status(QueryError::from(error)))
}
