//! `fdmap.v1.Files`.

use std::collections::HashSet;
use std::pin::Pin;

use fdmap_proto::convert::{ConvertError, FileName, backing_from_wire, seals_from_wire};
use fdmap_proto::file::{Access, Right};
use fdmap_proto::units::FileId;
use fdmap_proto::v1;
use fdmap_proto::v1::files_server::Files;
use fdmap_proto::v1::watch_response::{Event, Lost, Removed, Synced};
use tokio::sync::broadcast::error::RecvError;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::Rpc;
use super::status::status;
use crate::files::{Caller, Creation, FileEvent, Happened, ServiceFile};
use crate::query::QueryError;

/// Files in one answer of List.
const PAGE: usize = 1000;

fn checked<T>(value: Result<T, ConvertError>) -> Result<T, Status> {
    value.map_err(|error| status(QueryError::from(error)))
}

fn file_message(file: &ServiceFile, caller: &Caller) -> Result<Option<v1::File>, Status> {
    Ok(Some(file.info(caller).map_err(status)?.into()))
}

#[tonic::async_trait]
impl Files for Rpc {
    async fn create(
        &self,
        request: Request<v1::CreateRequest>,
    ) -> Result<Response<v1::CreateResponse>, Status> {
        let caller = self.caller(&request)?;
        let request = request.into_inner();
        let creation = Creation {
            name: request.name,
            size_bytes: request.size_bytes,
            backing: checked(backing_from_wire(request.backing, request.hugetlb_page_size))?,
            seals: checked(seals_from_wire(&request.seals))?,
            access: checked(request.access.map(Access::try_from).transpose())?,
        };
        let by = caller.clone();
        let file = self.blocking(move |service| service.registry.create(&by, creation)).await?;
        Ok(Response::new(v1::CreateResponse { file: file_message(&file, &caller)? }))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::GetResponse>, Status> {
        let caller = self.caller(&request)?;
        let name = checked(FileName::try_from(request.into_inner().file))?;
        let file = self.service.registry.find(&caller, &name, Right::Inspect).map_err(status)?;
        Ok(Response::new(v1::GetResponse { file: file_message(&file, &caller)? }))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        let caller = self.caller(&request)?;
        let request = request.into_inner();
        let most = match usize::try_from(request.page_size) {
            Ok(most @ 1..=PAGE) => most,
            _ => PAGE,
        };
        let (files, more) = self.service.registry.list(&caller, &request.page_token, most);
        let next_page_token = files.last().filter(|_| more).map_or_else(String::new, |f| f.name().to_owned());
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
        let name = checked(FileName::try_from(file))?;
        let by = caller.clone();
        let file = self.blocking(move |service| service.registry.resize(&by, &name, size_bytes)).await?;
        Ok(Response::new(v1::ResizeResponse { file: file_message(&file, &caller)? }))
    }

    async fn seal(&self, request: Request<v1::SealRequest>) -> Result<Response<v1::SealResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::SealRequest { file, seals } = request.into_inner();
        let name = checked(FileName::try_from(file))?;
        let seals = checked(seals_from_wire(&seals))?;
        if seals.is_empty() {
            return checked(Err(ConvertError::Missing("seals")));
        }
        let by = caller.clone();
        let file = self.blocking(move |service| service.registry.seal(&by, &name, seals)).await?;
        Ok(Response::new(v1::SealResponse { file: file_message(&file, &caller)? }))
    }

    async fn set_access(
        &self,
        request: Request<v1::SetAccessRequest>,
    ) -> Result<Response<v1::SetAccessResponse>, Status> {
        let caller = self.caller(&request)?;
        let v1::SetAccessRequest { file, access } = request.into_inner();
        let name = checked(FileName::try_from(file))?;
        let access = checked(access.ok_or(ConvertError::Missing("access")).and_then(Access::try_from))?;
        let by = caller.clone();
        let file = self.blocking(move |service| service.registry.set_access(&by, &name, access)).await?;
        Ok(Response::new(v1::SetAccessResponse { file: file_message(&file, &caller)? }))
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteRequest>,
    ) -> Result<Response<v1::DeleteResponse>, Status> {
        let caller = self.caller(&request)?;
        let name = checked(FileName::try_from(request.into_inner().file))?;
        // Dropping the file may free all its pages.
        self.blocking(move |service| service.registry.delete(&caller, &name).map(drop)).await?;
        Ok(Response::new(v1::DeleteResponse {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchResponse, Status>> + Send>>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let caller = self.caller(&request)?;
        let share = self.service.watches.take(&caller, 1).map_err(status)?;
        // Events first, files after: what happens in between is told twice rather than not at all.
        let mut events = self.service.registry.watch();
        let (sender, receiver) = tokio::sync::mpsc::channel(64);
        let mut watcher = Watcher { rpc: self.clone(), caller, told: HashSet::new() };
        tokio::spawn(async move {
            let _share = share;
            let mut told = watcher.present();
            told.push(Event::Synced(Synced {}));
            loop {
                for event in told.drain(..) {
                    if sender.send(Ok(v1::WatchResponse { event: Some(event) })).await.is_err() {
                        return;
                    }
                }
                let event = tokio::select! {
                    event = events.recv() => event,
                    () = sender.closed() => return,
                };
                match event {
                    Ok(event) => told.extend(watcher.event(&event)),
                    Err(RecvError::Lagged(lost)) => told.push(Event::Lost(Lost { events: lost })),
                    Err(RecvError::Closed) => return,
                }
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }
}

/// One who watches, and which files that one has been told of.
struct Watcher {
    rpc: Rpc,
    caller: Caller,
    told: HashSet<FileId>,
}

impl Watcher {
    fn present(&mut self) -> Vec<Event> {
        let (files, _) = self.rpc.service.registry.list(&self.caller, "", usize::MAX);
        files.iter().filter_map(|file| self.message(file)).map(Event::Present).collect()
    }

    fn message(&mut self, file: &ServiceFile) -> Option<v1::File> {
        let info = file.info(&self.caller).ok()?;
        self.told.insert(info.id);
        Some(info.into())
    }

    fn event(&mut self, event: &FileEvent) -> Option<Event> {
        let name = FileName::Id(event.id);
        match self.rpc.service.registry.find(&self.caller, &name, Right::Inspect) {
            Ok(file) if event.happened == Happened::Created => self.message(&file).map(Event::Created),
            Ok(file) => self.message(&file).map(Event::Changed),
            // It is removed, or removed from the caller's sight; whoever never saw it is not told its name.
            Err(_) => {
                let removed = Removed { id: event.id.get(), name: event.name.clone() };
                self.told.remove(&event.id).then_some(Event::Removed(removed))
            }
        }
    }
}
