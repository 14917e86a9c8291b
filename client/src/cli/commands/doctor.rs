//! `fdmap doctor` without a process: capabilities of the host and the service.

use std::process::ExitCode;

use fdmap_client::proto::{Availability, Capability, HelperIncident};
use fdmap_client::{ClientError, FdpassClient};
use serde_json::json;

use super::super::CliError;
use super::super::output::table;
use super::Context;

pub(super) async fn doctor(context: &mut Context) -> Result<ExitCode, CliError> {
    let client = match context.client().await {
        Ok(client) => client,
        Err(CliError::Client(error @ (ClientError::Unreachable { .. } | ClientError::TimedOut { .. }))) => {
            let endpoint = context.service.endpoint();
            let directory = endpoint.socket.parent().map_or(".".into(), |path| path.to_string_lossy());
            eprintln!(
                "fdmap: start a service with `fdmapd --runtime-dir {directory}`; `fdmapd --check` lists the kernel's \
                 capabilities without a service"
            );
            return Err(error.into());
        }
        Err(error) => return Err(error),
    };
    let info = client.host_info().await?;
    let mut capabilities = vec![fdpass_capability(context)];
    capabilities.extend(info.capabilities);
    let lacks = |capability: &&Capability| {
        capability.availability != Availability::Available && !capability.impact.is_empty()
    };
    let complete = !capabilities.iter().any(|capability| lacks(&capability));
    let code = if complete { ExitCode::SUCCESS } else { ExitCode::from(1) };
    if context.out.json {
        context.out.json_line(&json!({
            "version": info.version,
            "instance": format!("{:016x}", info.instance),
            "probe": info.probe,
            "kernel_release": info.kernel_release,
            "page_size": info.page_size,
            "uid": info.uid,
            "caller_uid": info.caller_uid,
            "capabilities": capabilities,
            "helper_incidents": info.helper_incidents,
        }))?;
        return Ok(code);
    }
    context.out.line(format_args!(
        "fdmapd {} on kernel {}, running as uid {}; your uid is {}",
        info.version, info.kernel_release, info.uid, info.caller_uid
    ))?;
    context.out.line(format_args!("probe for page states: {}", info.probe))?;
    let mut grid = table(&["capability", "availability", "detail"], &[]);
    for Capability { name, availability, detail, .. } in &capabilities {
        grid.add_row([name.as_ref(), <&str>::from(availability), detail.as_str()]);
    }
    context.out.line(grid.trim_fmt())?;
    for Capability { name, impact, .. } in capabilities.iter().filter(lacks) {
        context.out.line(format_args!("without {name}: {impact}"))?;
    }
    for HelperIncident { name, count } in info.helper_incidents.iter().filter(|incident| incident.count > 0) {
        context
            .out
            .line(format_args!("helper processes of the service: {name}, {count} times since it started"))?;
    }
    Ok(code)
}

/// Whether this client can use the fdpass socket.
fn fdpass_capability(context: &Context) -> Capability {
    let endpoint = context.service.endpoint();
    let (availability, detail) = if context.service.tcp().is_some() {
        (Availability::Unavailable, "connected over TCP".to_owned())
    } else {
        match FdpassClient::connect(&endpoint, context.service.timeouts()) {
            Ok(_) => (Availability::Available, endpoint.fdpass.display().to_string()),
            Err(error) => (Availability::Unavailable, error.to_string()),
        }
    };
    let impact = "no descriptors, adoption, tracking and shared snapshots".into();
    Capability { name: "fdpass".into(), availability, detail, impact }
}
