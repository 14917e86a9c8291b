//! `fdmap migrate`, `fdmap receive` and `fdmap fence`.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use fdmap_client::grpc::TlsAddress;
use fdmap_client::image::Control;
use fdmap_client::image::dump::{DumpSource, PauseMethod};
use fdmap_client::migration::MigrationMonitor;
use fdmap_client::migration::control::ControlServer;
use fdmap_client::migration::receive::{MigrationListener, ReceiveOptions, ReceivedFile, ReceiverTls};
use fdmap_client::migration::source::{DestinationAddress, MigrateOptions, MigrateReport, migrate};
use fdmap_client::proto::{Access, Lifetime};
use indicatif::HumanBytes;
use serde_json::json;
use tokio::runtime::Handle;

use super::super::CliError;
use super::super::args::{ControlArgs, FenceArgs, MigrateArgs, ReceiveArgs};
use super::super::output::table;
use super::super::private_socket::PrivateSocket;
use super::Context;
use super::image_task::{elapsed_text, jobs, nanoseconds, watch};

/// The service for other programs, at its socket.
struct Steering(Option<(ControlServer, PrivateSocket)>);

impl Steering {
    /// Serves if that is wanted.
    fn start(
        args: ControlArgs,
        monitor: &Arc<MigrationMonitor>,
        control: &Arc<Control>,
    ) -> Result<Self, CliError> {
        let Some(path) = args.control else { return Ok(Self(None)) };
        let failed = |path: PathBuf| {
            move |error| CliError::Io { what: format!("listening on {}", path.display()), error }
        };
        let path = std::path::absolute(&path).map_err(failed(path))?;
        let socket = PrivateSocket::listen(path)?;
        let listener = socket.listener.try_clone();
        let server = listener
            .and_then(|listener| ControlServer::start(listener, Arc::clone(monitor), Arc::clone(control)))
            .map_err(failed(socket.path.clone()))?;
        Ok(Self(Some((server, socket))))
    }

    /// Ends after the last answers.
    async fn end(self) {
        if let Some((server, _socket)) = self.0 {
            server.end().await;
        }
    }
}

pub(super) async fn migrate_file(context: &mut Context, args: MigrateArgs) -> Result<(), CliError> {
    let tls = context.service.tls()?;
    let client = context.client().await?;
    let source = DumpSource::open(&client, &mut context.fdpass()?, Handle::current(), &args.file)?;
    let control = Arc::new(Control::default());
    let monitor = Arc::new(MigrationMonitor::new(args.await_finalize));
    let steering = Steering::start(args.control, &monitor, &control)?;
    let options = MigrateOptions {
        destination: DestinationAddress {
            address: TlsAddress { uri: format!("https://{}", args.to), tls },
            timeouts: context.service.timeouts(),
            reconnect_within: args.reconnect_within,
        },
        compression: args.compress.compression(),
        jobs: jobs(args.jobs),
        pause: match (args.pause, args.freeze_cgroup) {
            (Some(pause), _) => PauseMethod::Commands { pause, resume: args.resume },
            (None, Some(path)) => PauseMethod::Cgroup(path),
            (None, None) => PauseMethod::ByCaller,
        },
        downtime: args.downtime,
        rounds: args.rounds.get(),
        monitor,
    };
    let (shared, runtime) = (Arc::clone(&control), Handle::current());
    // It blocks in reads. This thread drives its connections.
    let task = move || migrate(&source, &options, &runtime, &shared);
    let report = watch(context, &control, || tokio::task::spawn_blocking(task)).await;
    steering.end().await;
    print(context, &report?)
}

fn print(context: &mut Context, report: &MigrateReport) -> Result<(), CliError> {
    if context.out.json {
        let rounds = report.rounds.iter().map(|round| {
            json!({
                "pages": round.pages,
                "zero_pages": round.zero_pages,
                "sent_bytes": round.sent_bytes,
                "elapsed_ns": nanoseconds(round.elapsed),
                "paused": round.paused,
            })
        });
        return context.out.json_line(&json!({
            "file": report.file,
            "rounds": rounds.collect::<Vec<_>>(),
            "downtime_ns": nanoseconds(report.downtime),
            "exact": report.exact,
            "reconnections": report.reconnections,
        }));
    }
    let mut table = table(&["round", "pages", "zero", "sent", "time"], &[0, 1, 2, 3, 4]);
    for (number, round) in (1..).zip(&report.rounds) {
        let paused = if round.paused { " (paused)" } else { "" };
        table.add_row([
            format!("{number}{paused}"),
            round.pages.to_string(),
            round.zero_pages.to_string(),
            HumanBytes(round.sent_bytes).to_string(),
            elapsed_text(round.elapsed),
        ]);
    }
    context.out.line(table.trim_fmt())?;
    let millis = 1e3 * report.downtime.as_secs_f64();
    let name = &report.file.name;
    context.out.line(format_args!(
        "{name} is at the destination; its writers were paused for {millis:.1} ms until then"
    ))
}

/// A received file for a command.
pub(super) type ForCommand = Option<(Vec<OsString>, OwnedFd)>;

pub(super) async fn receive(context: &mut Context, args: ReceiveArgs) -> Result<ForCommand, CliError> {
    let tls = context.service.tls()?;
    let client = context.client().await?;
    let fdpass = context.fdpass()?;
    let ReceiveArgs { listen, name, reconnect_within, control: steered, lifetime, access, command } = args;
    let access = access.owned_by(name.as_ref().and_then(|name| name.uid))?;
    let host = client.host_info().await?;
    let control = Arc::new(Control::default());
    let monitor = Arc::new(MigrationMonitor::new(false));
    let options = ReceiveOptions {
        name: name.map(|name| name.name),
        access: access.over(Access::private(host.caller_uid, host.caller_gid))?,
        takes_access: host.caller_uid == 0 || host.caller_uid == host.uid,
        lifetime: lifetime.lifetime(),
        reconnect_within,
        monitor: Arc::clone(&monitor),
    };
    let certificates = ReceiverTls { ca: &tls.ca, cert: &tls.cert, key: &tls.key };
    let receiver = MigrationListener::bind(&listen, certificates).await?;
    let address = receiver.address()?;
    let steering = Steering::start(steered, &monitor, &control)?;
    if context.out.json {
        context.out.json_line(&json!({ "listening": address.to_string() }))?;
        context.out.flush()?;
    } else {
        eprintln!("fdmap: listening at {address}");
    }
    let shared = Arc::clone(&control);
    let receiving = receiver.receive(client, fdpass, options, shared);
    let received = watch(context, &control, || tokio::spawn(receiving)).await;
    steering.end().await;
    let ReceivedFile { info, descriptor } = received?;
    if !command.is_empty() {
        return Ok(Some((command, descriptor)));
    }
    if context.out.json {
        context.out.json_line(&json!({ "file": info }))?;
    } else {
        let size = HumanBytes(info.size_bytes);
        context.out.line(format_args!("received {}, {size}, id:{}", info.caller_name(), info.id))?;
    }
    if info.lifetime != Lifetime::Kept {
        let name = info.caller_name();
        eprintln!(
            "fdmap: {name} ends soon unless a process opens it; give a command, or --keep where that is permitted"
        );
    }
    Ok(None)
}

pub(super) async fn fence(context: &mut Context, args: &FenceArgs) -> Result<(), CliError> {
    let reason = args.reason.as_deref().unwrap_or_default();
    if reason.is_empty() && !args.remove {
        return Err(CliError::Usage("the reason is empty".to_owned()));
    }
    let client = context.client().await?;
    let info = match reason {
        "" => client.end_fence(&args.file, "").await?,
        reason => client.fence(&args.file, reason).await?,
    };
    if context.out.json {
        return context.out.json_line(&info);
    }
    let name = info.caller_name();
    match &info.fence {
        Some(reason) => context.out.line(format_args!("{name} is fenced: {reason}")),
        None => context.out.line(format_args!("{name} is not fenced")),
    }
}
