//! `hirte-proxy`: systemd runs it when a proxy service starts and after it has stopped. The call to
//! the agent of this machine is in `fleet::helper`.

use std::ffi::OsString;
use std::process::ExitCode;

use super::output;
use crate::fleet::dbus::bus::Bus;
use crate::fleet::helper::{self, Action, Call};

const USAGE: &str = "\
Usage: hirte-proxy [--user] create|remove hirte-proxy@NODE_UNIT.service

systemd runs this program for proxy services. `create` returns when UNIT.service is active on NODE, and
`remove` releases the unit. Exit code 0: done, 1: failed, 2: wrong usage.
";

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
    if arguments == ["--help"] || arguments == ["-h"] {
        return if output::data(USAGE).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let Some(call) = parse(&arguments) else {
        output::message(USAGE.trim_end());
        return ExitCode::from(2);
    };
    // One thread, because starting more costs more time than they save.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(helper::run(&call)),
        Err(error) => Err(error.to_string()),
    };
    match done {
        Ok(remark) => {
            remark.iter().for_each(|remark| output::message(remark));
            ExitCode::SUCCESS
        }
        Err(problem) => {
            output::error(&anyhow::Error::msg(problem));
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: &[&str]) -> Option<Call> {
    let (bus, rest) = match arguments {
        ["--user", rest @ ..] => (Bus::User, rest),
        rest => (Bus::System, rest),
    };
    let (action, proxy) = match rest {
        ["create", proxy] => (Action::Create, *proxy),
        ["remove", proxy] => (Action::Remove, *proxy),
        _ => return None,
    };
    Some(Call { bus, action, proxy: proxy.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_those_of_the_unit_file() {
        let call = |bus, action| {
            let proxy = "hirte-proxy@bar_db.service".to_owned();
            Some(Call { bus, action, proxy })
        };
        let proxy = "hirte-proxy@bar_db.service";
        assert_eq!(parse(&["create", proxy]), call(Bus::System, Action::Create));
        assert_eq!(parse(&["--user", "remove", proxy]), call(Bus::User, Action::Remove));
        for wrong in
            [&[][..], &["create"], &["create", "a", "b"], &["start", "a"], &["create", "a", "--user"]]
        {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }
}
