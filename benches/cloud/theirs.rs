//! A moto server, and the two tools that the controller is compared with.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::cloud::REGION;
use crate::cloud::front::Front;
use crate::harness::wait_for;
use crate::{Figures, PORTS, SWAPPED, figure};

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/cloud")
}

fn venv() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/venv-bench")
}

/// Installs the Python packages; does nothing if they are already installed.
pub(crate) fn install() {
    let (wanted, done) = (here().join("requirements.txt"), venv().join("installed.txt"));
    if std::fs::read(&done).ok() == Some(std::fs::read(&wanted).unwrap()) {
        return;
    }
    run(Command::new("python3").args(["-m", "venv"]).arg(venv()));
    let pip = ["install", "--quiet", "--disable-pip-version-check", "-r"];
    run(Command::new(venv().join("bin/pip")).args(pip).arg(&wanted));
    std::fs::copy(wanted, done).unwrap();
}

fn run(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let printed =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed:\n{printed}");
}

/// The engine of LocalStack without the rest of it: Ansible calls STS, which LocalStack does not
/// provide here.
pub(crate) struct Moto {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Moto {
    pub(crate) fn start() -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let child = Command::new(venv().join("bin/moto_server"))
            .args(["-H", "127.0.0.1", "-p", &address.port().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let moto = Self { child, address };
        wait_for("moto", Duration::from_secs(60), || TcpStream::connect(address).ok());
        moto
    }

    /// Resets the server, so that each measurement starts with the same empty server.
    pub(crate) fn forget(&self) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let request =
            "POST /moto-api/reset HTTP/1.1\r\nHost: moto\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        // The server may have ended already; an error here is not reported.
        let _ = (self.child.kill(), self.child.wait());
    }
}

fn with_account(mut command: Command, front: &Front) -> Command {
    command
        .env("AWS_ENDPOINT_URL", format!("http://{}", front.address))
        .env("AWS_REGION", REGION)
        .env("AWS_DEFAULT_REGION", REGION)
        .env("AWS_ACCESS_KEY_ID", "100000000000")
        .env("AWS_SECRET_ACCESS_KEY", "secret");
    command
}

/// Measures the three tasks, each as one run of a program for these ports.
fn three(front: &Front, go: impl Fn(&[u16; 3])) -> Figures {
    [PORTS, PORTS, SWAPPED].map(|ports| {
        front.take_counts();
        let began = Instant::now();
        go(&ports);
        figure(front, began.elapsed())
    })
}

pub(crate) fn boto3(front: &Front, groups: u32) -> Figures {
    three(front, |ports| {
        let mut python = with_account(Command::new(venv().join("bin/python")), front);
        python.arg(here().join("per_port.py")).arg(groups.to_string());
        run(python.args(ports.map(|port| port.to_string())));
    })
}

pub(crate) fn ansible(front: &Front, groups: u32, vpc: &str) -> Figures {
    three(front, |ports| {
        let mut ansible = with_account(Command::new(venv().join("bin/ansible-playbook")), front);
        let values = serde_json::json!({"count": groups, "ports": ports, "vpc": vpc});
        ansible.args(["-i", "localhost,", "-e", &values.to_string(), "-e"]);
        ansible.arg(format!("ansible_python_interpreter={}", venv().join("bin/python").display()));
        run(ansible.arg(here().join("groups.yml")).env("LC_ALL", "C.UTF-8"));
    })
}
