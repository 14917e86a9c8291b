//! Asynchronous gRPC client for all operations that pass no descriptor.

mod bitmaps;
mod changes;
mod channel;
mod cursors;
mod files;
mod host;
mod pages;
mod tracking;

pub use bitmaps::Bitmaps;
pub use changes::{ChangedBatch, ChangedBitmaps, Changes, ChangesEncoding, ChangesHeader, ChangesOptions};
pub use channel::{Tls, TlsAddress};
#[cfg(feature = "migration")]
pub(crate) use channel::{cause, tls as connect_tls};
pub use fdmap_proto::{
    Availability, BegunCursor, Capability, Checkpoint, CheckpointEvent, DirtyRate, FileCoverage,
    HelperIncident, HostInfo, HostLimits, PageInfo, PageSummary,
};
pub use files::{CreateFile, FileChange, Watch};
pub use pages::{Diff, Lookup, Scan, ScanBatch, ScanEncoding, ScanHeader, ScanRequest, SummaryOptions};
pub use tracking::{CheckpointWatch, TrackingEvent};

use std::error::Error as _;
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

/// Maximum size of a received message, bytes. Messages of the service are much smaller.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Connection to a service. Clones share the connection.
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
    /// [`ClientError::Unreachable`] if no service listens on the socket; [`ClientError::TimedOut`].
    pub async fn connect(endpoint: &Endpoint, timeouts: Timeouts) -> Result<Self, ClientError> {
        Ok(Self::of_channel(channel::unix(endpoint, timeouts).await?, timeouts))
    }

    /// Connects to a service over TCP with mutual TLS.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] if no service listens at the address or a certificate is rejected;
    /// [`ClientError::Path`] if a certificate file cannot be read; [`ClientError::TimedOut`].
    pub async fn connect_tls(address: &TlsAddress, timeouts: Timeouts) -> Result<Self, ClientError> {
        Ok(Self::of_channel(channel::tls(address, timeouts).await?, timeouts))
    }

    fn of_channel(channel: Channel, timeouts: Timeouts) -> Self {
        Self {
            files: FilesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            pages: PagesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            tracking: TrackingClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            host: HostClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES),
            timeouts,
        }
    }

    /// Waits for a response, at most for the answer timeout.
    async fn wait<T>(
        &self,
        call_name: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ClientError> {
        bounded(call_name, self.timeouts, call).await.map(Response::into_inner)
    }
}

async fn bounded<T>(
    call_name: &'static str,
    timeouts: Timeouts,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, ClientError> {
    let after = timeouts.answer;
    match timeout(after, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) => Err(refusal(&status)),
        Err(_) => Err(ClientError::TimedOut { call: call_name, after }),
    }
}

fn refusal(status: &Status) -> ClientError {
    match status.code() {
        Code::Cancelled | Code::Unknown => ClientError::Broken(status.message().to_owned()),
        // An error of the transport has a source. A status that the service sent has none.
        Code::Unavailable if status.source().is_some() => ClientError::Broken(status.message().to_owned()),
        code => ClientError::Refused {
            code: RefusalCode::from_number(code.into()),
            message: status.message().to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn status_of_the_service_is_a_refusal_and_of_the_transport_a_lost_connection() {
        for (sent, code) in [
            (Status::unavailable("the request failed"), RefusalCode::Unavailable),
            (Status::deadline_exceeded("the request failed"), RefusalCode::DeadlineExceeded),
        ] {
            let refused = refusal(&sent);
            assert_eq!(refused.refusal(), Some(code));
            assert_eq!(refused.to_string(), "the request failed");
        }
        let mut lost = Status::unavailable("error trying to connect");
        lost.set_source(Arc::new(std::io::Error::from(std::io::ErrorKind::ConnectionReset)));
        assert!(matches!(refusal(&lost), ClientError::Broken(_)));
        assert!(matches!(refusal(&Status::unknown("h2 protocol error")), ClientError::Broken(_)));
    }
}
