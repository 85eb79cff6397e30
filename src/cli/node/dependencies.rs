//! `juju node deps`, `allow` and `deny`: proxy services, and which nodes may depend on which.

use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::json;

use super::{DepsArgs, Format, PermissionArgs, Through, render};
use crate::cli::error::{Refusal, Usage, parse_arg};
use crate::cli::output;
use crate::fleet::client::{Client, ClientError, Proxy};
use crate::fleet::name::NodeName;
use crate::runtime::clock::utc;
use crate::status::render::dot::quoted;
use crate::status::render::svg::Picture;
use crate::status::render::tabular::table;

/// Prints the proxies, of one node or of all.
pub(super) async fn list(client: &Client, args: &DepsArgs, json: bool) -> anyhow::Result<ExitCode> {
    let mut proxies = client.proxies().await.context("cannot list the proxy services")?;
    if let Some(node) = &args.node {
        let nodes = client.nodes().await.context("cannot list the nodes")?;
        if !nodes.iter().any(|known| known.name == *node) {
            return Err(ClientError::NoSuchNode(node.clone()).into());
        }
        proxies.retain(|proxy| proxy.source == *node || proxy.target == *node);
    }
    let text = match args.format {
        _ if json => as_json(&proxies),
        Format::Table => as_table(&proxies),
        Format::Json => as_json(&proxies),
        Format::Dot => as_dot(&proxies),
        Format::Svg => as_svg(&proxies),
    };
    output::data(&text).context("cannot write to stdout").map(|()| ExitCode::SUCCESS)
}

/// Permits dependencies, or withdraws the permission.
pub(super) async fn permit(
    through: &Through<'_>,
    args: &PermissionArgs,
    is_allowed: bool,
) -> anyhow::Result<ExitCode> {
    let Through::Environment(globals) = through else {
        let text = "the manager on a bus reads permissions from its file: AllowDependenciesOn";
        return Err(Usage::new(text).into());
    };
    let node: NodeName = parse_arg(&args.node)?;
    let on: Vec<NodeName> = args.on.iter().map(|name| parse_arg(name)).collect::<Result<_, _>>()?;
    let changed = globals
        .in_environment(async |_, environment| {
            let mut names = vec![node.clone()];
            names.extend(on.iter().cloned());
            let unknown = environment.unknown_nodes(&names).await?;
            if let Some(name) = unknown.into_iter().next().filter(|_| is_allowed) {
                return Err(Refusal::NoNode { name }.into());
            }
            Ok(environment.set_dependencies(&node, &on, is_allowed).await?)
        })
        .await?;
    for name in &on {
        let text = match (is_allowed, changed.contains(name)) {
            (true, true) => format!("Units of node '{node}' may depend on units of node '{name}'."),
            (true, false) => {
                format!("Units of node '{node}' may already depend on units of node '{name}'.")
            }
            (false, true) => {
                format!("Units of node '{node}' may no longer depend on units of node '{name}'.")
            }
            (false, false) => {
                format!("Units of node '{node}' were not permitted to depend on units of node '{name}'.")
            }
        };
        output::message(&text);
    }
    Ok(ExitCode::SUCCESS)
}

fn as_table(proxies: &[Proxy]) -> String {
    let row = |proxy: &Proxy| {
        let Proxy { source, name, target, unit, state, since_ms, reason } = proxy;
        [source, name, target, unit, state, &utc(*since_ms), reason].map(Clone::clone).into()
    };
    let rows: Vec<Vec<String>> = proxies.iter().map(row).collect();
    let mut text = String::new();
    table(&mut text, &["NODE", "PROXY", "ON-NODE", "SYSTEMD-UNIT", "STATE", "SINCE", "REASON"], &rows);
    text
}

fn as_json(proxies: &[Proxy]) -> String {
    let value = |proxy: &Proxy| {
        json!({
            "node": proxy.source,
            "proxy": proxy.name,
            "on-node": proxy.target,
            "systemd-unit": proxy.unit,
            "state": proxy.state,
            "since": utc(proxy.since_ms),
            "reason": (!proxy.reason.is_empty()).then_some(&proxy.reason),
        })
    };
    render::line(&proxies.iter().map(value).collect())
}

/// The unit of another node, as graphs show it.
fn target(proxy: &Proxy) -> String {
    format!("{}/{}", proxy.target, proxy.unit)
}

fn as_dot(proxies: &[Proxy]) -> String {
    let mut out = String::from("digraph dependencies {\n  rankdir=LR;\n  node [fontname=\"sans-serif\"];\n");
    for proxy in proxies {
        let style = match proxy.state.as_str() {
            "active" => "solid",
            "waiting" => "dashed",
            _ => "dotted",
        };
        let (source, label) = (quoted(&proxy.source), quoted(&proxy.state));
        out.push_str(&format!("  {source} [shape=box3d];\n"));
        if !proxy.target.is_empty() {
            let target = quoted(&target(proxy));
            out.push_str(&format!(
                "  {target} [shape=box];\n  {source} -> {target} [label={label}, style={style}];\n"
            ));
        }
    }
    out.push_str("}\n");
    out
}

fn as_svg(proxies: &[Proxy]) -> String {
    let mut picture = Picture::default();
    let (mut sources, mut targets) = (Vec::new(), Vec::new());
    for proxy in proxies {
        let mut frame = |known: &mut Vec<(String, usize)>, column, name: String| {
            if let Some((_, frame)) = known.iter().find(|(known, _)| *known == name) {
                return *frame;
            }
            let frame = picture.add(column, vec![name.clone()], "#e4ecf7");
            known.push((name, frame));
            frame
        };
        let source = frame(&mut sources, 0, proxy.source.clone());
        let target = (!proxy.target.is_empty()).then(|| frame(&mut targets, 2, target(proxy)));
        let colour = match proxy.state.as_str() {
            "active" => "#d9f2d9",
            "waiting" => "#ffffff",
            _ => "#f7d9d9",
        };
        let mut lines = vec![proxy.name.clone(), proxy.state.clone()];
        lines.extend((!proxy.reason.is_empty()).then(|| proxy.reason.clone()));
        let middle = picture.add(1, lines, colour);
        picture.link(source, middle);
        if let Some(target) = target {
            picture.link(middle, target);
        }
    }
    picture.drawn()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies() -> Vec<Proxy> {
        let text = str::to_owned;
        let active = Proxy {
            source: text("foo"),
            name: text("hirte-proxy@bar_db.service"),
            target: text("bar"),
            unit: text("db.service"),
            state: text("active"),
            since_ms: 0,
            reason: String::new(),
        };
        let failed = Proxy {
            name: text("hirte-proxy@bardb.service"),
            target: String::new(),
            unit: String::new(),
            state: text("failed"),
            reason: text("its name \"<has>\" no _"),
            ..active.clone()
        };
        vec![active, failed]
    }

    #[test]
    fn all_formats_show_every_proxy() {
        let table = as_table(&proxies());
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].starts_with("NODE  PROXY ") && lines.len() == 3, "{table}");
        let active =
            ["foo", "hirte-proxy@bar_db.service", "bar", "db.service", "active", "1970-01-01T00:00:00Z", "-"];
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>(), active);
        let parsed: serde_json::Value = serde_json::from_str(&as_json(&proxies())).unwrap();
        assert_eq!((&parsed[0]["reason"], &parsed[0]["on-node"]), (&json!(null), &json!("bar")));
        let dot = as_dot(&proxies());
        assert!(dot.contains("\"foo\" -> \"bar/db.service\" [label=\"active\", style=solid];"), "{dot}");
        let svg = as_svg(&proxies());
        assert!(
            svg.contains("its name &quot;&lt;has&gt;&quot; no _") && svg.matches("<rect").count() == 4,
            "{svg}"
        );
    }
}
