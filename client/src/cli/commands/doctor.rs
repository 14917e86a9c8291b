//! What this host and its service can do, and what is lost.

use std::process::ExitCode;

use fdmap_client::grpc::Availability;
use fdmap_client::{ClientError, FdpassClient};
use serde_json::json;

use super::super::CliError;
use super::super::output::table;
use super::Context;

/// One thing that was looked at.
struct Finding {
    name: String,
    answer: Availability,
    detail: String,
    lost: String,
}

pub(super) async fn doctor(context: &mut Context) -> Result<ExitCode, CliError> {
    let client = match context.client().await {
        Ok(client) => client,
        Err(CliError::Client(error @ (ClientError::Unreachable { .. } | ClientError::TimedOut { .. }))) => {
            let place = context.service.place();
            let advice = format!(
                "start one with: fdmapd --runtime-dir {} (fdmapd --check tells what the kernel can do without one)",
                place.socket.parent().map_or(".".into(), |folder| folder.to_string_lossy())
            );
            eprintln!("fdmap: {advice}");
            return Err(error.into());
        }
        Err(error) => return Err(error),
    };
    let info = client.host_info().await?;
    let fdpass = if context.service.tcp().is_some() {
        (Availability::Unavailable, "the service is asked by TCP".to_owned())
    } else {
        match FdpassClient::connect(&context.service.place(), context.service.timeouts()) {
            Ok(_) => (Availability::Available, context.service.place().fdpass.display().to_string()),
            Err(error) => (Availability::Unavailable, error.to_string()),
        }
    };
    let mut findings = vec![Finding {
        name: "fdpass".to_owned(),
        answer: fdpass.0,
        detail: fdpass.1,
        lost: "descriptors, adoption and shared snapshots".to_owned(),
    }];
    findings.extend(info.capabilities.into_iter().map(|fact| Finding {
        name: fact.name,
        answer: fact.availability,
        detail: fact.detail,
        lost: fact.impact,
    }));
    let lost = |finding: &&Finding| finding.answer != Availability::Available && !finding.lost.is_empty();
    let missing = findings.iter().any(|finding| lost(&finding));
    let code = if missing { ExitCode::from(1) } else { ExitCode::SUCCESS };
    if context.out.json {
        let facts: Vec<_> = findings
            .iter()
            .map(|finding| {
                json!({
                    "name": finding.name,
                    "answer": finding.answer.name(),
                    "detail": finding.detail,
                    "impact": finding.lost,
                })
            })
            .collect();
        context.out.json_line(&json!({
            "version": info.version,
            "instance": format!("{:016x}", info.instance),
            "probe": info.probe.name(),
            "kernel_release": info.kernel_release,
            "page_size": info.page_size.bytes(),
            "service_uid": info.uid,
            "caller_uid": info.you.0,
            "facts": facts,
        }))?;
        return Ok(code);
    }
    context.out.line(format_args!(
        "fdmapd {} on kernel {}, as user {}; you are user {}",
        info.version, info.kernel_release, info.uid, info.you.0
    ))?;
    context.out.line(format_args!("page states are read by the {} probe", info.probe))?;
    let mut grid = table(&["what", "answer", "how it was found out"], &[]);
    for finding in &findings {
        grid.add_row([finding.name.as_str(), finding.answer.name(), finding.detail.as_str()]);
    }
    context.out.line(grid.trim_fmt())?;
    for finding in findings.iter().filter(lost) {
        context.out.line(format_args!("without {}: {}", finding.name, finding.lost))?;
    }
    Ok(code)
}
