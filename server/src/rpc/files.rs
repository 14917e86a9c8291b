//! Handlers of `fdmap.v1.Files`.

use std::collections::HashMap;
use std::sync::Arc;

use fdmap_proto::convert::{ConvertError, FileName, backing_from_wire, lifetime_from_wire, seals_from_wire};
use fdmap_proto::file::{Access, OwnedName, Right};
use fdmap_proto::units::FileId;
use fdmap_proto::v1;
use fdmap_proto::v1::files_server::Files;
use fdmap_proto::v1::watch_response::{Event, Lost, Removed, Synced};
use tokio::sync::broadcast::error::RecvError;
use tonic::{Request, Response, Status};

use super::stream::{ResponseStream, channel};
use super::{Rpc, decoded};
use crate::blocking::Call;
use crate::files::{Caller, FileEvent, FileEventKind, FileSpec, Registry, ServiceFile};
use crate::service::Service;
use crate::status::status;

/// Files in one List answer.
const MAX_LIST_FILES: usize = 1000;

fn file_message(file: &ServiceFile, caller: &Caller) -> Result<Option<v1::File>, Status> {
    Ok(Some(file.info(caller).map_err(status)?.into()))
}

impl TryFrom<v1::CreateRequest> for FileSpec {
    type Error = ConvertError;

    fn try_from(request: v1::CreateRequest) -> Result<Self, ConvertError> {
        Ok(Self {
            name: request.name,
            size_bytes: request.size_bytes,
            backing: backing_from_wire(request.backing, request.hugetlb_page_size)?,
            seals: seals_from_wire(&request.seals)?,
            access: request.access.map(Access::try_from).transpose()?,
            lifetime: lifetime_from_wire(request.lifetime)?,
        })
    }
}

#[tonic::async_trait]
impl Files for Rpc {
    async fn create(
        &self,
        request: Request<v1::CreateRequest>,
    ) -> Result<Response<v1::CreateResponse>, Status> {
        let caller = self.caller(&request)?;
        let spec = decoded(FileSpec::try_from(request.into_inner()))?;
        let owner = caller.clone();
        let create =
            move |service: &Arc<Service>| service.add_file(|files| files.create(&owner, spec.clone()));
        let file = self.blocking(&caller, Call::new("Create"), create).await?;
        Ok(Response::new(v1::CreateResponse { file: file_message(&file, &caller)? }))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::GetResponse>, Status> {
        let caller = self.caller(&request)?;
        let file = self.file(&caller, request.into_inner().file, Right::Inspect)?;
        Ok(Response::new(v1::GetResponse { file: file_message(&file, &caller)? }))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        let caller = self.caller(&request)?;
        let request = request.into_inner();
        let max_files = match usize::try_from(request.page_size) {
            Ok(size @ 1..=MAX_LIST_FILES) => size,
            _ => MAX_LIST_FILES,
        };
        let after = decoded(parse_page_token(&request.page_token))?;
        let (files, last) = self.service.registry.list(&caller, after.as_ref(), max_files);
        let next_page_token = last.map_or_else(String::new, |name| name.to_string());
        let mut messages = Vec::with_capacity(files.len());
        for file in files {
            messages.extend(file_message(&file, &caller)?);
        }
        Ok(Response::new(v1::ListResponse { files: messages, next_page_token }))
    }

    async fn resize(
        &self,
        request: Request<v1::ResizeRequest>,
    ) -> Result<Response<v1::ResizeResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::ResizeRequest { file, size_bytes } = request.into_inner();
        let name = decoded(FileName::try_from(file))?;
        let by = caller.clone();
        let resize = move |service: &Arc<Service>| service.registry.resize(&by, &name, size_bytes);
        let file = self.blocking(&caller, Call::new("Resize"), resize).await?;
        Ok(Response::new(v1::ResizeResponse { file: file_message(&file, &caller)? }))
    }

    async fn seal(&self, request: Request<v1::SealRequest>) -> Result<Response<v1::SealResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::SealRequest { file, seals } = request.into_inner();
        let name = decoded(FileName::try_from(file))?;
        let seals = decoded(seals_from_wire(&seals))?;
        if seals.is_empty() {
            return decoded(Err(ConvertError::Missing("seals")));
        }
        let by = caller.clone();
        let seal = move |service: &Arc<Service>| service.registry.seal(&by, &name, seals);
        let file = self.blocking(&caller, Call::new("Seal"), seal).await?;
        Ok(Response::new(v1::SealResponse { file: file_message(&file, &caller)? }))
    }

    async fn set_access(
        &self,
        request: Request<v1::SetAccessRequest>,
    ) -> Result<Response<v1::SetAccessResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::SetAccessRequest { file, access } = request.into_inner();
        let name = decoded(FileName::try_from(file))?;
        let access = decoded(access.ok_or(ConvertError::Missing("access")).and_then(Access::try_from))?;
        let by = caller.clone();
        let set = move |service: &Arc<Service>| service.registry.set_access(&by, &name, access);
        let file = self.blocking(&caller, Call::new("SetAccess"), set).await?;
        Ok(Response::new(v1::SetAccessResponse { file: file_message(&file, &caller)? }))
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteRequest>,
    ) -> Result<Response<v1::DeleteResponse>, Status> {
        let caller = self.caller(&request)?;
        let name = decoded(FileName::try_from(request.into_inner().file))?;
        // In a thread for it: the drop of the file may free all its pages.
        let by = caller.clone();
        let delete = move |service: &Arc<Service>| {
            service.registry.delete(&by, &name).map(|file| service.drop_ended(file))
        };
        self.blocking(&caller, Call::new("Delete"), delete).await?;
        Ok(Response::new(v1::DeleteResponse {}))
    }

    async fn fence(&self, request: Request<v1::FenceRequest>) -> Result<Response<v1::FenceResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::FenceRequest { file, reason, expected_reason } = request.into_inner();
        let file = self.file(&caller, file, Right::Migrate)?;
        let (fenced, by) = (Arc::clone(&file), caller.clone());
        // After the checkpoint of the file that is in progress.
        let change = move |registry: &Registry| {
            if reason.is_empty() {
                registry.end_fence(&by, &fenced, &expected_reason)
            } else {
                registry.set_fence(&by, &fenced, reason)
            }
        };
        let change = move |service: &Arc<Service>| change(&service.registry);
        self.on_file(&caller, "Fence", &file, Right::Migrate, change).await?;
        Ok(Response::new(v1::FenceResponse { file: file_message(&file, &caller)? }))
    }

    type WatchStream = ResponseStream<v1::WatchResponse>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let caller = self.caller(&request)?;
        let permits = (self.service.watches.acquire(&caller, 1).map_err(status)?, self.stream(&caller)?);
        // Subscribe before listing: a change in between is reported twice rather than missed.
        let mut events = self.service.registry.watch();
        let (sender, response) = channel();
        let mut watcher = Watcher { rpc: self.clone(), caller, reported: HashMap::new() };
        tokio::spawn(async move {
            let _permits = permits;
            let mut pending = watcher.present();
            pending.push(Event::Synced(Synced {}));
            loop {
                for event in pending.drain(..) {
                    if sender.send(Ok(v1::WatchResponse { event: Some(event) })).await.is_err() {
                        return;
                    }
                }
                let event = tokio::select! {
                    event = events.recv() => event,
                    () = sender.closed() => return,
                };
                match event {
                    Ok(event) => pending.extend(watcher.event(&event)),
                    Err(RecvError::Lagged(lost)) => pending.push(Event::Lost(Lost { events: lost })),
                    Err(RecvError::Closed) => return,
                }
            }
        });
        Ok(response)
    }
}

/// The name after which a list continues. The token of the first request is empty.
fn parse_page_token(token: &str) -> Result<Option<OwnedName>, ConvertError> {
    if token.is_empty() {
        return Ok(None);
    }
    OwnedName::parse(token).map(Some).ok_or(ConvertError::PageToken)
}

/// A Watch stream, with the files that it has reported to its client, and their owners.
struct Watcher {
    rpc: Rpc,
    caller: Caller,
    reported: HashMap<FileId, u32>,
}

impl Watcher {
    fn present(&mut self) -> Vec<Event> {
        let (files, _) = self.rpc.service.registry.list(&self.caller, None, usize::MAX);
        files.iter().filter_map(|file| self.message(file)).map(Event::Present).collect()
    }

    fn message(&mut self, file: &ServiceFile) -> Option<v1::File> {
        let info = file.info(&self.caller).ok()?;
        self.reported.insert(info.id, info.access.uid);
        Some(info.into())
    }

    fn event(&mut self, event: &FileEvent) -> Option<Event> {
        let name = FileName::Id(event.id);
        match self.rpc.service.registry.find(&self.caller, &name, Right::Inspect) {
            Ok(file) if event.kind == FileEventKind::Created => self.message(&file).map(Event::Created),
            Ok(file) => self.message(&file).map(Event::Changed),
            // The file was deleted, or the caller lost the inspect right. A caller that never had the right must not learn the
            // name.
            Err(_) => {
                let uid = self.reported.remove(&event.id)?;
                Some(Event::Removed(Removed { id: event.id.get(), name: event.name.clone(), uid }))
            }
        }
    }
}
