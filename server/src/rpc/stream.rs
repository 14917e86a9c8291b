//! Streamed answers.

use std::pin::Pin;
use std::sync::Arc;

use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

use super::Rpc;
use crate::blocking::Call;
use crate::files::Caller;
use crate::service::Service;
use crate::status::status;

pub(super) type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Marks the answer of a call for which its user is charged one stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streamed;

/// Messages that a watch may have ready for a client before the watch waits for it.
const WATCH_BACKLOG: usize = 64;

impl Rpc {
    /// A stream as [`streamed_by_threads`] if its messages may take long to find, else as [`streamed`].
    pub(super) fn streamed<T: Send + 'static>(
        &self,
        is_long: bool,
        caller: Caller,
        call: Call,
        permit: impl Send + 'static,
        messages: impl Iterator<Item = T> + Send + 'static,
    ) -> Response<ResponseStream<T>> {
        match is_long {
            true => streamed_by_threads(Arc::clone(&self.service), caller, call, permit, messages),
            false => streamed(permit, messages),
        }
    }
}

/// A stream, charged by `permit`, that computes each item when the client is ready to receive it. A client that reads slowly
/// or disconnects causes no more work than it receives.
fn streamed<T: Send + 'static>(
    permit: impl Send + 'static,
    items: impl Iterator<Item = T> + Send + 'static,
) -> Response<ResponseStream<T>> {
    let charged = move |item| {
        let _ = &permit;
        Ok(item)
    };
    answer(tokio_stream::iter(items.map(charged)))
}

/// The same for items that may take long to find: each is computed in a thread of the caller, and at most one in advance.
fn streamed_by_threads<T: Send + 'static>(
    service: Arc<Service>,
    caller: Caller,
    call: Call,
    permit: impl Send + 'static,
    mut items: impl Iterator<Item = T> + Send + 'static,
) -> Response<ResponseStream<T>> {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let _permit = permit;
        // An error means that the client has gone.
        while let Ok(room) = sender.reserve().await {
            let next = move || (items.next(), items);
            match service.blocking.run(&caller, call.clone(), next).await {
                Ok((Some(item), rest)) => {
                    items = rest;
                    room.send(Ok(item));
                }
                Ok((None, _)) => return,
                Err(error) => return room.send(Err(status(error))),
            }
        }
    });
    answer(ReceiverStream::new(receiver))
}

/// A stream that another task feeds.
pub(super) fn channel<T: Send + 'static>()
-> (tokio::sync::mpsc::Sender<Result<T, Status>>, Response<ResponseStream<T>>) {
    let (sender, receiver) = tokio::sync::mpsc::channel(WATCH_BACKLOG);
    (sender, answer(ReceiverStream::new(receiver)))
}

fn answer<T>(stream: impl Stream<Item = Result<T, Status>> + Send + 'static) -> Response<ResponseStream<T>> {
    let mut response = Response::new(Box::pin(stream) as ResponseStream<T>);
    response.extensions_mut().insert(Streamed);
    response
}
