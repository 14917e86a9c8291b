//! The layer that bounds requests and answers of all services: [`unreceived`], [`unsent`].

use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use super::peer::PeerInfo;
use super::stream::Streamed;
use super::unreceived::RequestCharge;
use super::unsent::AnswerKind;
use super::{unreceived, unsent};
use crate::status::status;

/// Reflection is a stream of requests, which a client leaves open. It has a limit of its own.
const REFLECTION: &str = "/grpc.reflection.";

/// Bounds requests and answers of a service.
#[derive(Clone, Copy, Debug)]
pub(super) struct BoundBodies;

#[derive(Clone, Debug)]
pub(super) struct BoundedService<S>(S);

impl<S> Layer<S> for BoundBodies {
    type Service = BoundedService<S>;

    fn layer(&self, inner: S) -> BoundedService<S> {
        BoundedService(inner)
    }
}

impl<S> Service<Request<Body>> for BoundedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Each connection has a peer.
        let bounds = request.extensions().get::<PeerInfo>().map(|peer| (peer.unreceived(), peer.unsent()));
        let Some((unreceived, unsent)) = bounds else {
            return Box::pin(self.0.call(request));
        };
        let is_one_message = !request.uri().path().starts_with(REFLECTION);
        let reserved = match unsent.reserve() {
            Ok(reserved) => reserved,
            Err(error) => return Box::pin(async move { Ok(status(error).into_http()) }),
        };
        let (mut parts, body) = request.into_parts();
        let (body, charge) = if is_one_message {
            unreceived::bounded(unreceived.clone(), body)
        } else {
            (body, RequestCharge::default())
        };
        parts.extensions.insert(unreceived.memory(charge.clone()));
        let answer = self.0.call(Request::from_parts(parts, body));
        Box::pin(async move {
            let answer = answer.await?;
            // The request is dropped.
            drop(charge);
            let is_stream = answer.extensions().get::<Streamed>().is_some();
            let kind = if is_stream { AnswerKind::Stream } else { AnswerKind::Single(reserved) };
            Ok(answer.map(|body| unsent::bounded(unsent, kind, body)))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tonic::{Code, Status};
    use tower::{ServiceExt as _, service_fn};

    use super::*;
    use crate::files::{Caller, Quotas};
    use crate::rpc::buffers::tests::buffers;

    #[tokio::test]
    async fn call_beyond_the_limit_of_its_user_does_not_take_effect() {
        let (calls, buffers) = (AtomicUsize::new(0), buffers(16 << 10, 0));
        let (caller, connections) =
            (Caller::new(7, 7, Vec::new(), 1), Quotas::new(16).quota("connections", 1));
        let permit = connections.acquire(&caller, 1).unwrap();
        let peer = PeerInfo::new(caller, permit, Arc::clone(&buffers));
        let handle = |_: Request<Body>| {
            calls.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok::<_, Status>(Response::new(Body::new("answer".to_owned()))))
        };
        let answer = || {
            let mut request = Request::new(Body::empty());
            request.extensions_mut().insert(peer.clone());
            BoundBodies.layer(service_fn(handle)).oneshot(request)
        };
        // All but what is reserved for one answer.
        let unread = buffers.charge(8 << 10).unwrap();
        let first = answer().await.unwrap();
        let refused = answer().await.unwrap();
        let status = Status::from_header_map(refused.headers()).unwrap();
        assert_eq!((status.code(), calls.load(Ordering::Relaxed)), (Code::ResourceExhausted, 1));
        drop((unread, first));
        assert!(Status::from_header_map(answer().await.unwrap().headers()).is_none());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }
}
