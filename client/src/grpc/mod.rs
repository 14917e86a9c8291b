//! The asynchronous client: everything that carries no descriptor.

mod changes;
mod channel;
mod cursors;
mod files;
mod host;
mod pages;
mod tracking;

pub use changes::{ChangedBatch, ChangedBitmaps, Changes, ChangesEncoding, ChangesHeader, ChangesOptions};
pub use channel::{Tls, TlsAddress};
pub use cursors::BegunCursor;
pub use files::{CreateFile, FileChange, Watch};
pub use host::{Availability, Capability, HostInfo, HostLimits};
pub use pages::{
    Batch, Bitmaps, Diff, Lookup, PageInfo, PageSummary, Scan, ScanEncoding, ScanHeader, ScanRequest,
    SummaryOptions,
};
pub use tracking::{Checkpoint, CheckpointEvent, CheckpointWatch, DirtyRate, FileCoverage, TrackingEvent};

use std::future::Future;

use fdmap_proto::v1::files_client::FilesClient;
use fdmap_proto::v1::host_client::HostClient;
use fdmap_proto::v1::pages_client::PagesClient;
use fdmap_proto::v1::tracking_client::TrackingClient;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::error::RefusalCode;
use crate::{ClientError, Endpoint, Timeouts};

/// The largest message that the service sends is well below this, bytes.
const MAX_MESSAGE: usize = 16 << 20;

/// A connection to a service. Clones share it.
#[derive(Clone, Debug)]
pub struct Client {
    files: FilesClient<Channel>,
    pages: PagesClient<Channel>,
    tracking: TrackingClient<Channel>,
    host: HostClient<Channel>,
    timeouts: Timeouts,
}

impl Client {
    /// Connects to the service on this host.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] if nobody is there.
    pub async fn connect(place: &Endpoint, timeouts: Timeouts) -> Result<Self, ClientError> {
        Ok(Self::of_channel(channel::unix(place, timeouts).await?, timeouts))
    }

    /// Connects to a service by TCP, where each side shows the other a certificate.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] if nobody is there, or the certificates are not accepted.
    pub async fn connect_tls(address: &TlsAddress, timeouts: Timeouts) -> Result<Self, ClientError> {
        Ok(Self::of_channel(channel::tls(address, timeouts).await?, timeouts))
    }

    fn of_channel(channel: Channel, timeouts: Timeouts) -> Self {
        Self {
            files: FilesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            pages: PagesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            tracking: TrackingClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            host: HostClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
            timeouts,
        }
    }

    /// Waits for an answer as long as this client does.
    async fn wait<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ClientError> {
        bounded(what, self.timeouts, call).await.map(Response::into_inner)
    }
}

async fn bounded<T>(
    what: &'static str,
    timeouts: Timeouts,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, ClientError> {
    let after = timeouts.answer;
    match timeout(after, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) => Err(refusal(what, timeouts, &status)),
        Err(_) => Err(ClientError::TimedOut { what, after }),
    }
}

fn refusal(what: &'static str, timeouts: Timeouts, status: &Status) -> ClientError {
    match status.code() {
        Code::DeadlineExceeded => ClientError::TimedOut { what, after: timeouts.answer },
        Code::Unavailable | Code::Cancelled | Code::Unknown => {
            ClientError::Broken(status.message().to_owned())
        }
        code => ClientError::Refused {
            code: RefusalCode::from_number(code.into()),
            message: status.message().to_owned(),
        },
    }
}
