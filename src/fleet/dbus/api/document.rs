//! The reference page of the public API. Pure.

use super::{Argument, Interface, JOB, MANAGER, MONITOR, MethodEffect, NODE};

const INTRODUCTION: &str = "\
# D-Bus API of the fleet

<!-- This page is generated from the introspection data. `BLESS=1` writes it again. -->

A manager has the name `org.containers.hirte` on its bus. Its objects have these interfaces. The
same interfaces are on the TLS connection of an operator. Names in object paths are escaped as
`sd_bus_path_encode` does.

Methods that are marked with *changes* are for root and for members of the group that `--bus-group`
names. All other methods, and all signals and properties, are for every client of the bus. Each
property emits `PropertiesChanged` when it changes.

Errors of systemd are returned with systemd's name, for example
`org.freedesktop.systemd1.NoSuchUnit`. The manager's own are `org.containers.hirte.Offline`,
`org.containers.hirte.NoSuchNode`, `org.containers.hirte.NoSuchSubscription` and
`org.containers.hirte.NotLeader`.
";

/// Returns the page in Markdown.
pub fn document() -> String {
    let mut page = INTRODUCTION.to_owned();
    for interface in [&MANAGER, &MONITOR, &NODE, &JOB] {
        add(&mut page, interface);
    }
    page
}

fn add(page: &mut String, interface: &Interface) {
    let Interface { name, path, about, .. } = interface;
    *page += &format!("\n## {name}\n\n{}\n\nObject path: `{path}`\n", wrapped(about, 0));
    let of = |arguments: &[Argument]| {
        let listed: Vec<String> = arguments.iter().map(|(name, sig)| format!("{sig} {name}")).collect();
        listed.join(", ")
    };
    for (title, is_empty) in [
        ("Methods", interface.methods.is_empty()),
        ("Signals", interface.signals.is_empty()),
        ("Properties", interface.properties.is_empty()),
    ] {
        if is_empty {
            continue;
        }
        *page += &format!("\n### {title}\n\n");
        match title {
            "Methods" => {
                for method in interface.methods {
                    let output = of(method.output);
                    let arrow = if output.is_empty() { String::new() } else { format!(" → {output}") };
                    let mark = if method.effect == MethodEffect::Changes { " (*changes*)" } else { "" };
                    let call = format!("- `{}({}){arrow}`{mark}", method.name, of(method.input));
                    *page += &format!("{call}\n  {}\n", wrapped(method.about, 2));
                }
            }
            "Signals" => {
                for signal in interface.signals {
                    let call = format!("- `{}({})`", signal.name, of(signal.arguments));
                    *page += &format!("{call}\n  {}\n", wrapped(signal.about, 2));
                }
            }
            _ => {
                for property in interface.properties {
                    let what = format!("- `{} {}`", property.signature, property.name);
                    *page += &format!("{what}\n  {}\n", wrapped(property.about, 2));
                }
            }
        }
    }
}

/// Wraps a text at 100 columns, with an indentation of the lines after the first.
fn wrapped(text: &str, indent: usize) -> String {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && indent + line.len() + 1 + word.len() > 100 {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines.push(line);
    lines.join(&format!("\n{}", " ".repeat(indent)))
}
