//! An S3 server on loopback: s3s with its file system, where `ROOT/BUCKET/KEY` is a file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fdmap_tests::cleanup::CleanupGuard;
use fdmap_tests::host::temp_dir;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::codegen::http::Request;
use tonic::codegen::http::header::IF_NONE_MATCH;
use tower::Service;

pub const BUCKET: &str = "images";
pub const ACCESS_KEY: &str = "AKIAFDMAPTEST";
pub const SECRET_KEY: &str = "fdmap-secret-that-no-message-has";

/// The service, whose conditional PUTs exclude each other: s3s-fs looks for the object before it writes it.
#[derive(Clone)]
struct Atomic {
    s3: S3Service,
    puts: Arc<tokio::sync::Mutex<()>>,
}

impl<B> Service<Request<B>> for Atomic
where
    S3Service: Service<Request<B>, Future: Send>,
    B: Send + 'static,
{
    type Response = <S3Service as Service<Request<B>>>::Response;
    type Error = <S3Service as Service<Request<B>>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.s3.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut s3, puts) = (self.s3.clone(), Arc::clone(&self.puts));
        Box::pin(async move {
            let is_conditional = request.headers().contains_key(IF_NONE_MATCH);
            let _put = if is_conditional { Some(puts.lock().await) } else { None };
            Service::call(&mut s3, request).await
        })
    }
}

/// A server with the bucket [`BUCKET`], until it is dropped.
pub struct Server {
    pub address: SocketAddr,
    root: PathBuf,
    runtime: Option<Runtime>,
    _guard: CleanupGuard,
}

impl Server {
    pub fn start() -> Self {
        let (root, guard) = temp_dir("fdmap-s3").unwrap();
        std::fs::create_dir(root.join(BUCKET)).unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(&root).unwrap());
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let service = TowerToHyperService::new(Atomic { s3: builder.build(), puts: Arc::default() });
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let connections = auto::Builder::new(TokioExecutor::new());
                let connection = connections.serve_connection(TokioIo::new(socket), service.clone());
                let connection = connection.into_owned();
                // Its errors are those that the client sees.
                tokio::spawn(async move { drop(connection.await) });
            }
        });
        Self { address, root, runtime: Some(runtime), _guard: guard }
    }

    /// File of an object.
    pub fn object(&self, key: &str) -> PathBuf {
        self.root.join(BUCKET).join(key)
    }

    /// Keys of all objects.
    pub fn keys(&self) -> Vec<String> {
        let mut keys = Vec::new();
        let bucket = self.root.join(BUCKET);
        let mut folders = vec![bucket.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    keys.push(path.strip_prefix(&bucket).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        keys.sort();
        keys
    }

    /// Files of uploads that are neither completed nor aborted.
    pub fn uploads(&self) -> Vec<String> {
        self.files(|name| name.starts_with(".upload"))
    }

    /// Number of parts in which an object was uploaded: the last number of its ETag.
    pub fn parts(&self, key: &str) -> usize {
        let size = std::fs::metadata(self.object(key)).unwrap().len();
        let texts = self.files(|name| name.ends_with(".internal.json")).into_iter().map(|name| {
            let text = std::fs::read_to_string(self.root.join(name)).unwrap();
            let (_, rest) = text.rsplit_once('-').unwrap_or_default();
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap_or(0)
        });
        let parts = texts.max().unwrap_or(0);
        println!("{key}: {size} bytes in {parts} parts");
        parts
    }

    fn files(&self, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let entries = std::fs::read_dir(&self.root).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| wanted(name)).collect()
    }

    /// Asserts that no object exists and no upload is in progress. A request that the client has given up may still end.
    #[track_caller]
    pub fn assert_empty(&self) {
        let begun = std::time::Instant::now();
        while !(self.keys().is_empty() && self.uploads().is_empty()) {
            let waited = begun.elapsed();
            assert!(waited < Duration::from_secs(5), "left: {:?} {:?}", self.keys(), self.uploads());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Copies all objects to a directory, as `aws s3 cp --recursive` does: each object is a regular file.
    pub fn download(&self, to: &Path) {
        for key in self.keys() {
            let target = to.join(&key);
            std::fs::create_dir_all(target.parent().unwrap()).unwrap();
            std::fs::copy(self.object(&key), target).unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
