//! One client's session on the hand-over socket.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Right};
use fdmap_proto::layout::{BodyLayout, Header};
use fdmap_proto::v1;
use fdmap_proto::v1::handover_reply::Result as Reply;
use tonic::Code;

use super::protocol::{Arrived, Operation, ProtocolError, operation};
use super::snapshot;
use crate::chain;
use crate::files::{Caller, FileError};
use crate::probe::{ScanError, Wants};
use crate::query::{QueryError, resolve_range};
use crate::rpc::Coded;
use crate::service::Service;

/// What goes back to the client.
#[derive(Debug)]
pub struct Answer {
    /// The message.
    pub reply: v1::HandoverReply,
    /// The descriptors that go along.
    pub descriptors: Vec<OwnedFd>,
    /// The session ends after it.
    pub last: bool,
}

/// One client's session.
pub struct Session {
    service: Arc<Service>,
    caller: Caller,
    greeted: bool,
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error(transparent)]
    Query(#[from] QueryError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Scan(#[from] Arc<ScanError>),
}

impl Failed {
    fn code(&self) -> Code {
        match self {
            Self::Protocol(ProtocolError::Meaning(error)) | Self::Query(error) => error.code(),
            Self::Protocol(ProtocolError::DescriptorsLost) => Code::ResourceExhausted,
            Self::Protocol(ProtocolError::NoOperation) => Code::Unimplemented,
            Self::Protocol(_) => Code::InvalidArgument,
            Self::File(error) => error.code(),
            Self::Scan(error) => error.code(),
        }
    }

    const fn is_fatal(&self) -> bool {
        matches!(self, Self::Protocol(error) if error.is_fatal())
    }
}

impl From<ScanError> for Failed {
    fn from(error: ScanError) -> Self {
        Self::Scan(Arc::new(error))
    }
}

type Done = Result<(Reply, Vec<OwnedFd>), Failed>;

impl Session {
    /// A session that has not begun yet.
    #[must_use]
    pub const fn new(service: Arc<Service>, caller: Caller) -> Self {
        Self { service, caller, greeted: false }
    }

    /// True once the client has said Hello.
    #[must_use]
    pub const fn greeted(&self) -> bool {
        self.greeted
    }

    /// Does what one packet asks for.
    pub async fn answer(&mut self, arrived: Arrived<'_>, descriptors: Vec<OwnedFd>) -> Answer {
        let done = match operation(arrived, self.greeted) {
            Ok(operation) => self.perform(operation, descriptors).await,
            Err(error) => Err(error.into()),
        };
        match done {
            Ok((reply, descriptors)) => {
                Answer { reply: v1::HandoverReply { result: Some(reply) }, descriptors, last: false }
            }
            Err(failed) => {
                let (code, message, fatal) = (i32::from(failed.code()), chain(&failed), failed.is_fatal());
                let error = Reply::Error(v1::Error { code, message, fatal });
                Answer {
                    reply: v1::HandoverReply { result: Some(error) },
                    descriptors: Vec::new(),
                    last: fatal,
                }
            }
        }
    }

    async fn perform(&mut self, operation: Operation, descriptors: Vec<OwnedFd>) -> Done {
        match operation {
            Operation::Hello { version, client } => {
                tracing::debug!(client, uid = self.caller.uid, "hand-over session begins");
                self.greeted = true;
                let welcome = v1::Welcome {
                    version,
                    server: env!("CARGO_PKG_VERSION").to_owned(),
                    instance: self.service.instance,
                    page_size: self.service.page_size.bytes(),
                };
                Ok((Reply::Welcome(welcome), Vec::new()))
            }
            Operation::Open { file, writable } => self.open(&file, writable),
            Operation::Adopt { name, access } => match descriptors.into_iter().next() {
                Some(memfd) => self.adopt(memfd, name, access).await,
                // operation() has counted them.
                None => Err(ProtocolError::Descriptors { operation: "Adopt", expected: 1, got: 0 }.into()),
            },
            Operation::Snapshot { file, range, layout, max_age } => {
                let file = self.service.registry.find(&self.caller, &file, Right::See)?;
                let file_pages = file.scans().source().file_pages()?;
                let range = resolve_range(range, file_pages)?;
                let reading = file.scans().read(&[range], Wants::default(), max_age).await?;
                let header = Header {
                    layout,
                    slots: layout == BodyLayout::Entries && self.service.probe.sees_slots(),
                    page_size: self.service.page_size,
                    range,
                    file: file.id(),
                    file_pages: reading.snapshot.file_pages(),
                    provenance: self.service.provenance(&reading.snapshot, &[range])?,
                };
                self.hand_out(header, reading.snapshot).await
            }
        }
    }

    fn open(&self, file: &FileName, writable: bool) -> Done {
        let file = self.service.registry.find(&self.caller, file, Right::Read)?;
        let descriptor = file.open_for(&self.caller, writable)?;
        let message = v1::File::from(file.info(&self.caller)?);
        Ok((Reply::Opened(v1::Opened { file: Some(message) }), vec![descriptor]))
    }

    async fn adopt(&self, memfd: OwnedFd, name: String, access: Option<Access>) -> Done {
        let (service, caller) = (Arc::clone(&self.service), self.caller.clone());
        let adopted = tokio::task::spawn_blocking(move || {
            let file = service.registry.adopt(&caller, memfd.as_fd(), name, access)?;
            file.info(&caller)
        });
        let info = adopted.await.map_err(|_| ScanError::Lost)??;
        Ok((Reply::Adopted(v1::Adopted { file: Some(info.into()) }), Vec::new()))
    }

    async fn hand_out(&self, header: Header, states: crate::pages::Snapshot) -> Done {
        let bytes = header.total_bytes().unwrap_or(u64::MAX);
        let room = self.service.shared.reserve(&self.caller, bytes, header.page_size)?;
        // Gone with this future: then nobody waits for the snapshot.
        let waiting = Arc::new(());
        let watched = Arc::downgrade(&waiting);
        let reply = v1::Snapshot {
            provenance: Some(header.provenance.into()),
            range: Some(header.range.into()),
            size_bytes: bytes,
        };
        let built = tokio::task::spawn_blocking(move || {
            snapshot::build(&header, &states, || watched.strong_count() == 0)
        });
        let built = built.await.map_err(|_| ScanError::Lost)?.map_err(FileError::from)?;
        drop(waiting);
        let built = built.ok_or(ScanError::GivenUp)?;
        self.service.shared.handed(built.ours, room);
        Ok((Reply::Snapshot(reply), vec![built.theirs]))
    }
}
