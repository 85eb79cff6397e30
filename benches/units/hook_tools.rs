//! The hook tools, from start to exit: alone, and with a store over TLS on loopback.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::Row;
use crate::authority::{TestCa, write};
use crate::harness::{Kind, Options, Store, binary, ports};
use crate::operator::Operator;

const CALLS: usize = 200;

pub(crate) fn measure() -> Vec<Row> {
    vec![
        start_up(),
        with_store("open-port and close-port over TLS, start to exit", true),
        with_store("the same without TLS", false),
    ]
}

/// Measures tools that change the ports of a unit.
fn with_store(what: &'static str, with_tls: bool) -> Row {
    let (ca, directory) = (TestCa::new(), tempfile::tempdir().unwrap());
    let files = ca.write_identity(directory.path());
    let ca_file = write(directory.path().join("ca.pem"), ca.pem()).display().to_string();
    let [cert, key] = [files.certificates, files.key].map(|path| path.display().to_string());
    let secure = format!("127.0.0.1:{}", ports::free());
    let arguments = ["--tls-listen", &secure, "--tls-cert", &cert, "--tls-key", &key];
    let arguments = arguments.map(str::to_owned).to_vec();
    let store = Store::start(Kind::Keeper, Options { arguments, ..Options::default() });
    let over_tls = format!("tls://{}", secure.replace("127.0.0.1", "localhost"));
    let operator = Operator::with_store(&if with_tls { over_tls } else { store.addr().to_string() });
    operator.does(&["--ca", &ca_file, "bootstrap"]);
    let charm = operator.charm("tool", "name: tool\nsummary: A charm\ndescription: To be measured.\n");
    operator.does(&["deploy", &charm, "tool"]);
    let variables = variables(&operator.does(&["hook-env", "tool/0"]).stdout);
    let once = |number: usize| {
        let name = if number.is_multiple_of(2) { "open-port" } else { "close-port" };
        let mut tool = Command::new(binary(name));
        tool.arg("8080/tcp").envs(variables.iter().cloned()).current_dir(operator.home());
        let begin = Instant::now();
        let done = tool.stdin(Stdio::null()).output().unwrap();
        let time = begin.elapsed();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        time
    };
    once(0);
    once(1);
    let (p99, told) = percentiles((0..CALLS).map(once).collect());
    (what, told, "p99 15 ms", p99 < Duration::from_millis(15))
}

/// Measures a tool that only refuses its arguments.
fn start_up() -> Row {
    let tool = binary("open-port");
    fs::read(&tool).unwrap();
    let once = |_| {
        let mut tool = Command::new(&tool);
        let begin = Instant::now();
        let done = tool.arg("not a port").stdin(Stdio::null()).output().unwrap();
        let time = begin.elapsed();
        assert!(!done.status.success());
        time
    };
    let (p99, told) = percentiles((0..CALLS).map(once).collect());
    ("start of open-port to its refusal of an argument", told, "p99 5 ms", p99 < Duration::from_millis(5))
}

/// The variables that a script exports.
fn variables(script: &str) -> Vec<(String, String)> {
    let shell = Command::new("sh").args(["-c", &format!("{script}env -0")]).env_clear().output().unwrap();
    let text = String::from_utf8(shell.stdout).unwrap();
    let pair = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    text.split('\0').filter_map(pair).collect()
}

fn percentiles(mut times: Vec<Duration>) -> (Duration, String) {
    times.sort_unstable();
    let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    (p99, format!("p50 {:.1} ms, p99 {:.1} ms", ms(p50), ms(p99)))
}
