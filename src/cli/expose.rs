//! `juju expose`: sets a service's flag. Its ports open once the firewall agent sees it.

use clap::Args;

use super::failure::{Refusal, typed};
use super::output;
use super::settings::Globals;
use crate::model::{Cidr, ServiceName};
use crate::store::Exposed;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Service to expose
    service: String,
    /// Only to these blocks of addresses, as in 10.0.0.0/8; the last command decides
    #[arg(long, value_name = "CIDR", num_args = 1..)]
    to: Vec<String>,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let name: ServiceName = typed(&args.service)?;
    let sources = args.to.iter().map(|text| source(text)).collect::<anyhow::Result<Vec<Cidr>>>()?;
    let became = globals
        .in_environment(async |_, environment| Ok(environment.expose_and_compare(&name, &sources).await?))
        .await?;
    output::message(&message(&name, &sources, &became));
    Ok(())
}

/// A block as it was typed. One with bits outside its prefix is refused: the operator may have meant one address, and would
/// let in millions.
fn source(text: &str) -> anyhow::Result<Cidr> {
    let block: Cidr = typed(text)?;
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
                Some(before) => format!("before to {}", words(before)),
                None => "its sources before could not be read".to_owned(),
            };
            format!("Service '{name}' is exposed to {} now; {before}.", words(sources))
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
    fn other_sources_are_told_with_those_before() {
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
                "Service 'web' is exposed to 192.0.2.0/24, 2001:db8::/32 now; before to 10.0.0.0/8.",
            ),
            (
                &[],
                Exposed::OtherSources { before: Some(other.clone()) },
                "Service 'web' is exposed to everyone now; before to 192.0.2.0/24, 2001:db8::/32.",
            ),
            (
                &[],
                Exposed::OtherSources { before: None },
                "Service 'web' is exposed to everyone now; its sources before could not be read.",
            ),
        ] {
            assert_eq!(message(&name, sources, &became), expected);
        }
    }
}
