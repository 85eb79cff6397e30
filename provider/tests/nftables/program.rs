//! Tests with programs that fail in place of nft.

use super::netns::{MACHINE, Net};
use super::{change, in_time, tcp};
use portcullis_provider::Error;
use portcullis_provider::nftables::Mode;
use portcullis_provider::provider::Firewall;
use std::collections::BTreeSet;
use std::time::Duration;

/// Returns the errors of a read and a change that run `command` instead of nft.
async fn with_program(command: &[&str], time_limit: Duration) -> [Error; 2] {
    let net = Net::new();
    let command = command.iter().map(|&word| word.to_owned()).collect();
    let firewall = net.firewall(Mode::Enforce, &[]).with_command(command, time_limit);
    let read = firewall.observe(&BTreeSet::from([MACHINE])).await.unwrap_err();
    let applied = firewall.apply(MACHINE, &change(&[tcp(80)], &[]), in_time()).await;
    assert_eq!(applied.opened, applied.closed);
    [read, applied.opened.unwrap_err()]
}

#[tokio::test]
async fn missing_program_is_named() {
    for error in with_program(&["no-such-nft"], Duration::from_secs(5)).await {
        let words =
            "machine 7 cannot be used: the program 'no-such-nft' was not found; is nftables installed?";
        assert_eq!(error.to_string(), words);
    }
}

#[tokio::test]
async fn missing_privileges_are_reported_as_denied() {
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "nft"];
    for error in with_program(&nobody, Duration::from_secs(5)).await {
        assert_eq!(error.kind(), "denied");
        assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    }
}

/// Returns a script that lists no tables, and runs `words` to load a ruleset.
fn empty_but(words: &str) -> String {
    format!(
        "case \"$*\" in *'list tables'*) echo '{{\"nftables\": []}}';; *list*) exit 1;; *) {words};; esac"
    )
}

#[tokio::test]
async fn refused_ruleset_is_an_invalid_request() {
    let script = empty_but("echo 'Error: syntax error' >&2; exit 1");
    let firewall = Net::new().firewall(Mode::Enforce, &[]);
    let command = ["sh", "-c", &script, "nft"].map(str::to_owned).to_vec();
    let firewall = firewall.with_command(command, Duration::from_secs(5));
    let error = firewall.apply(MACHINE, &change(&[tcp(80)], &[]), in_time()).await.opened.unwrap_err();
    let words = "machine 7 refused as invalid: nft ended with exit status: 1: Error: syntax error";
    assert_eq!(error.to_string(), words);
}

#[tokio::test]
async fn hanging_program_is_killed() {
    let [read, applied] = with_program(&["sh", "-c", "exec sleep 60"], Duration::from_millis(50)).await;
    assert_eq!((read.kind(), applied.kind()), ("unavailable", "unavailable"), "no ruleset was sent");

    let script = empty_but("exec sleep 60");
    let command = ["sh", "-c", &script, "nft"].map(str::to_owned).to_vec();
    let firewall = Net::new().firewall(Mode::Enforce, &[]).with_command(command, Duration::from_millis(500));
    let error = firewall.apply(MACHINE, &change(&[tcp(80)], &[]), in_time()).await.opened.unwrap_err();
    assert!(error.may_have_been_applied(), "{error}");
}

#[tokio::test]
async fn invalid_output_is_an_error() {
    for (script, words) in [
        ("echo hello", "nft's listing is not JSON"),
        ("exec yes", "nft says more than"),
        ("echo '{}'", "has no 'nftables'"),
        ("printf '\\377'", "not UTF-8"),
        ("exit 1", "nft ended with exit status: 1"),
    ] {
        for error in with_program(&["sh", "-c", script], Duration::from_secs(20)).await {
            assert_eq!(error.kind(), "unusable", "{script}");
            assert!(error.to_string().contains(words), "{script}: {error}");
        }
    }
}
