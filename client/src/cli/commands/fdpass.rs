//! Commands that pass descriptors: open, adopt, snapshot.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::units::to_u64;
use fdmap_client::proto::{Access, PageIndex, PageRange, PageState, VariantArray as _};
use fdmap_sys::fd::{dup2_inheritable, duplicate_inherited};
use indicatif::HumanBytes;
use serde_json::json;

use super::super::CliError;
use super::super::args::{AdoptArgs, LayoutArg, OpenArgs, SnapshotArgs};
use super::super::views::provenance_text;
use super::Context;

pub(super) fn open(context: &Context, args: OpenArgs) -> Result<ExitCode, CliError> {
    let (descriptor, _) = context.fdpass()?.open(&args.file, args.write)?;
    let mut words = args.command.into_iter();
    let program = words.next().ok_or_else(|| CliError::Usage("no command given".to_owned()))?;
    let number = dup2_inheritable(descriptor, args.fd)?;
    let error = std::process::Command::new(&program).args(words).env("FDMAP_FD", number.to_string()).exec();
    Err(CliError::Io { what: format!("running {}", program.display()), error })
}

pub(super) fn adopt(context: &mut Context, args: &AdoptArgs) -> Result<ExitCode, CliError> {
    let memfd: OwnedFd = match (&args.path, args.fd) {
        (Some(path), _) => {
            let failed = |error| CliError::Io { what: format!("opening {}", path.display()), error };
            OpenOptions::new().read(true).write(true).open(path).map_err(failed)?.into()
        }
        (None, Some(number)) => duplicate_inherited(number)?,
        (None, None) => return Err(CliError::Usage("give --fd or --path".to_owned())),
    };
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let owner = args.name.as_ref().and_then(|name| name.uid);
    let access = args.access.clone().owned_by(owner)?.over(Access::private(uid, gid))?;
    let name = args.name.as_ref().map_or("", |name| &name.name);
    let file =
        context.fdpass()?.adopt_with_lifetime(memfd.as_fd(), name, access, args.lifetime.lifetime())?;
    super::files::print(context, &file)?;
    context.out.flush()?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn snapshot(context: &mut Context, args: &SnapshotArgs) -> Result<ExitCode, CliError> {
    let layout = match args.layout {
        LayoutArg::Entries => BodyLayout::Entries,
        LayoutArg::States => BodyLayout::States,
    };
    let mut fdpass = context.fdpass()?;
    let range = match args.range {
        None => None,
        Some(range) => {
            let file_pages = match range.end {
                Some(_) => 0,
                // The header has the size, and needs no other right than the snapshot.
                None => {
                    let one = PageRange::at(range.start, 1);
                    let probe = fdpass.snapshot(&args.file, Some(one), BodyLayout::States, args.max_age)?;
                    probe.header().file_pages
                }
            };
            let none = || CliError::Usage(format!("page {} is past the end of the file", range.start));
            Some(range.within(file_pages).filter(|range| !range.is_empty()).ok_or_else(none)?)
        }
    };
    let snapshot = fdpass.snapshot(&args.file, range, layout, args.max_age)?;
    if let Some(path) = &args.output {
        if path.as_os_str() == "-" {
            context.out.bytes(snapshot.bytes())?;
        } else {
            let failed = |error| CliError::Io { what: format!("writing {}", path.display()), error };
            File::create(path).and_then(|mut file| file.write_all(snapshot.bytes())).map_err(failed)?;
        }
        context.out.flush()?;
        return Ok(ExitCode::SUCCESS);
    }
    let header = snapshot.header();
    let mut counts: Vec<_> = PageState::VARIANTS.iter().map(|state| (*state, 0_u64)).collect();
    for page in header.range.start().0..header.range.end().0 {
        let state = snapshot.state(PageIndex(page));
        if let Some((_, count)) = counts.iter_mut().find(|(of, _)| Some(*of) == state) {
            *count += 1;
        }
    }
    if context.out.json {
        let pages: serde_json::Map<_, _> = counts
            .iter()
            .map(|(state, count)| (format!("{}_pages", state.to_string().replace('-', "_")), (*count).into()))
            .collect();
        context.out.json_line(&json!({
            "size_bytes": snapshot.bytes().len(),
            "range": header.range,
            "file_pages": header.file_pages,
            "slots": header.slots,
            "pages": pages,
            "provenance": &header.provenance,
        }))?;
    } else {
        let bytes = HumanBytes(to_u64(snapshot.bytes().len()));
        context.out.line(format_args!("{bytes} for pages {}", header.range))?;
        for (state, count) in counts.iter().filter(|(_, count)| *count > 0) {
            context.out.line(format_args!("{state:<12} {count}"))?;
        }
        context.out.line(provenance_text(&header.provenance))?;
    }
    context.out.flush()?;
    Ok(ExitCode::SUCCESS)
}
