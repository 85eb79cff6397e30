//! `juju expose`: sets the exposed flag of a service. The firewall controller then opens its ports.

use crate::cli::args::environment::Globals;
use crate::cli::error::{Refusal, parse_arg};
use crate::cli::output;
use crate::model::{Cidr, ServiceName};
use crate::store::Exposed;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Service to expose
    service: String,
    /// Allow only these address blocks, for example 10.0.0.0/8 [default: everyone]
    #[arg(long, value_name = "CIDR", num_args = 1..)]
    to: Vec<String>,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let name: ServiceName = parse_arg(&args.service)?;
    let sources = args.to.iter().map(|text| source(text)).collect::<anyhow::Result<Vec<Cidr>>>()?;
    let became = globals
        .in_environment(async |_, environment| Ok(environment.expose_and_compare(&name, &sources).await?))
        .await?;
    output::message(&message(&name, &sources, &became));
    Ok(())
}

/// Parses an address block. A block with bits outside its prefix is refused: the operator may have
/// meant a single address.
fn source(text: &str) -> anyhow::Result<Cidr> {
    let block: Cidr = parse_arg(text)?;
    if block.has_host_bits(text) {
        return Err(Refusal::HostBits { text: text.to_owned(), block }.into());
    }
    Ok(block)
}

fn message(name: &ServiceName, sources: &[Cidr], became: &Exposed) -> String {
    match became {
        Exposed::Now => format!("Service '{name}' was exposed."),
        Exposed::AsBefore => format!("Service '{name}' was already exposed."),
        Exposed::OtherSources { before } => {
            let before = match before {
                Some(before) => format!("previously to {}", words(before)),
                None => "its previous sources could not be read".to_owned(),
            };
            format!("Service '{name}' is now exposed to {}; {before}.", words(sources))
        }
    }
}

fn words(sources: &[Cidr]) -> String {
    if sources.is_empty() {
        return "everyone".to_owned();
    }
    let mut sources = sources.to_vec();
    sources.sort_unstable();
    sources.dedup();
    sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_host_bits_are_refused() {
        for (text, accepted) in [
            ("10.0.0.1/8", false),
            ("10.0.0.0/8", true),
            ("192.0.2.7", true),
            ("2001:db8::1/32", false),
            ("2001:db8::/32", true),
            ("everywhere", false),
        ] {
            assert_eq!(source(text).is_ok(), accepted, "{text}");
        }
    }

    #[test]
    fn changed_sources_are_reported_with_the_previous_ones() {
        let blocks =
            |texts: &[&str]| -> Vec<Cidr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let name: ServiceName = "web".parse().unwrap();
        let (some, other) = (blocks(&["10.0.0.0/8"]), blocks(&["2001:db8::/32", "192.0.2.0/24"]));
        for (sources, became, expected) in [
            (&[][..], Exposed::Now, "Service 'web' was exposed."),
            (&[], Exposed::AsBefore, "Service 'web' was already exposed."),
            (
                &other,
                Exposed::OtherSources { before: Some(some) },
                "Service 'web' is now exposed to 192.0.2.0/24, 2001:db8::/32; previously to 10.0.0.0/8.",
            ),
            (
                &[],
                Exposed::OtherSources { before: Some(other.clone()) },
                "Service 'web' is now exposed to everyone; previously to 192.0.2.0/24, 2001:db8::/32.",
            ),
            (
                &[],
                Exposed::OtherSources { before: None },
                "Service 'web' is now exposed to everyone; its previous sources could not be read.",
            ),
        ] {
            assert_eq!(message(&name, sources, &became), expected);
        }
    }
}
