//! LocalStack's EC2, started on a free loopback port and stopped on drop.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const START_MAX: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(crate) struct LocalStack {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) started_in: Duration,
    /// The directory of its state, deleted on drop.
    _dir: tempfile::TempDir,
}

impl LocalStack {
    pub(crate) fn start() -> Self {
        let began = Instant::now();
        let python = project().join(".venv-localstack/bin/python");
        let requirements = "provider/tests/localstack-requirements.txt";
        assert!(
            python.exists(),
            "LocalStack is missing; make it with: python3 -m venv .venv-localstack && \
             .venv-localstack/bin/pip install -r {requirements}"
        );
        let dir = tempfile::tempdir().unwrap();
        let address = free_address();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let child = Command::new(python)
            .args(["-m", "localstack.runtime.main"])
            .current_dir(dir.path())
            .env("GATEWAY_SERVER", "hypercorn")
            .env("GATEWAY_LISTEN", address.to_string())
            .env("SERVICES", "ec2")
            .env("STRICT_SERVICE_LOADING", "1")
            .env("EAGER_SERVICE_LOADING", "1")
            .env("DISABLE_EVENTS", "1")
            .env("SKIP_SSL_CERT_DOWNLOAD", "1")
            .env("DNS_ADDRESS", "0")
            .env("OVERRIDE_IN_DOCKER", "0")
            .env("LOCALSTACK_VOLUME_DIR", dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut started = Self { child, address, started_in: Duration::ZERO, _dir: dir };
        while !started.is_healthy() {
            if began.elapsed() > START_MAX || started.child.try_wait().unwrap().is_some() {
                let log = std::fs::read_to_string(started._dir.path().join("log")).unwrap_or_default();
                panic!("LocalStack did not start: {log}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        started.started_in = began.elapsed();
        started
    }

    fn is_healthy(&self) -> bool {
        let answer = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(self.address)?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            write!(
                stream,
                "GET /_localstack/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        answer().is_ok_and(|answer| answer.contains("\"ec2\": \"running\""))
    }
}

impl Drop for LocalStack {
    fn drop(&mut self) {
        // The process may have ended already, and drop cannot report errors.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the root of the workspace, whichever of its packages includes this file.
pub(crate) fn project() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = if package.join("provider").is_dir() { package } else { package.parent().unwrap() };
    root.to_owned()
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
