//! Commands that create, list, change and delete files.

use fdmap_client::grpc::{CreateFile, FileChange};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{Access, FileInfo};
use indicatif::HumanBytes;
use serde_json::json;

use super::super::CliError;
use super::super::args::{AccessArgs, CreateArgs, SealArg};
use super::super::output::table;
use super::super::parse::Huge;
use super::Context;

pub(super) async fn create(context: &mut Context, args: CreateArgs) -> Result<(), CliError> {
    let options = args.access.owned_by(args.name.uid)?;
    let client = context.client().await?;
    // The owner is the caller as seen by the service.
    let access = match options.over(Access::private(0, 0))? {
        None => None,
        Some(_) => {
            let info = client.host_info().await?;
            options.over(Access::private(info.caller_uid, info.caller_gid))?
        }
    };
    let file = client
        .create(CreateFile {
            name: args.name.name,
            size_bytes: args.size,
            backing: args.huge.map(Huge::backing).unwrap_or_default(),
            seals: args.seal.into_iter().map(SealArg::seal).collect(),
            access,
            lifetime: args.lifetime.lifetime(),
        })
        .await?;
    print(context, &file)
}

/// Prints one file.
pub(super) fn print(context: &mut Context, file: &FileInfo) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json_line(file);
    }
    let size = HumanBytes(file.size_bytes);
    context.out.line(format_args!("{}  id:{}  {size}  {}", file.caller_name(), file.id, file.lifetime))
}

pub(super) async fn list(context: &mut Context) -> Result<(), CliError> {
    let files = context.client().await?.list().await?;
    if context.out.json {
        return context.out.json_line(&files);
    }
    let mut table =
        table(&["name", "size", "allocated", "owner", "rights", "seals", "lifetime", "id"], &[1, 2, 3]);
    for file in &files {
        table.add_row([
            file.caller_name(),
            HumanBytes(file.size_bytes).to_string(),
            HumanBytes(file.allocated_bytes).to_string(),
            file.access.uid.to_string(),
            file.caller_rights.to_string(),
            file.seals.to_string(),
            file.lifetime.to_string(),
            file.id.to_string(),
        ]);
    }
    context.out.line(table.trim_fmt())
}

pub(super) async fn delete(context: &mut Context, files: &[FileName]) -> Result<(), CliError> {
    let client = context.client().await?;
    for file in files {
        client.delete(file).await?;
        if context.out.json {
            context.out.json_line(&json!({ "deleted": file.to_string() }))?;
        }
    }
    Ok(())
}

pub(super) async fn resize(context: &mut Context, file: &FileName, size: u64) -> Result<(), CliError> {
    let file = context.client().await?.resize(file, size).await?;
    print(context, &file)
}

pub(super) async fn seal(context: &mut Context, file: &FileName, seals: &[SealArg]) -> Result<(), CliError> {
    let seals = seals.iter().map(|seal| seal.seal()).collect();
    let file = context.client().await?.seal(file, seals).await?;
    print(context, &file)
}

pub(super) async fn access(
    context: &mut Context,
    file: &FileName,
    args: &AccessArgs,
) -> Result<(), CliError> {
    let client = context.client().await?;
    let now = client.get(file).await?;
    let Some(access) = args.over(now.access)? else {
        return Err(CliError::Usage(
            "no change requested: give --mode, --owner, --group, --other, --uid or --gid".to_owned(),
        ));
    };
    let file = client.set_access(file, access).await?;
    print(context, &file)
}

pub(super) async fn watch(context: &mut Context) -> Result<(), CliError> {
    let client = context.client().await?;
    let caller = client.host_info().await?.caller_uid;
    let mut watch = client.watch().await?;
    while let Some(change) = watch.next().await? {
        let (event, file) = match &change {
            FileChange::Present(file) => ("present", Some(file)),
            FileChange::Created(file) => ("created", Some(file)),
            FileChange::Changed(file) => ("changed", Some(file)),
            FileChange::Synced | FileChange::Removed { .. } | FileChange::Lost(_) => ("", None),
        };
        if context.out.json {
            let line = match &change {
                FileChange::Synced => json!({ "event": "synced" }),
                FileChange::Removed { id, name } => {
                    json!({ "event": "removed", "id": id.to_string(), "name": name.name, "uid": name.uid })
                }
                FileChange::Lost(events) => json!({ "event": "lost", "events": events }),
                _ => json!({ "event": event, "file": file }),
            };
            context.out.json_line(&line)?;
        } else {
            match (&change, file) {
                (FileChange::Removed { id, name }, _) => {
                    let name = name.of_caller(caller);
                    context.out.line(format_args!("removed  {name}  id:{id}"))?;
                }
                (FileChange::Lost(events), _) => {
                    context.out.line(format_args!("lost     {events} events: output was read too slowly"))?;
                }
                (_, Some(file)) => {
                    let (name, id, seals) = (file.caller_name(), file.id, file.seals);
                    let size = HumanBytes(file.size_bytes);
                    context.out.line(format_args!("{event:8} {name}  id:{id}  {size}  seals {seals}"))?;
                }
                (_, None) => {}
            }
        }
        context.out.flush()?;
    }
    Ok(())
}
