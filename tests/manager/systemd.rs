//! The results of systemd's jobs, from a systemd that a test plays.

use futures_util::StreamExt as _;
use portcullis::fleet::dbus::bus::Bus;
use portcullis::fleet::dbus::errors::{CallError, UNKNOWN_METHOD};
use portcullis::fleet::dbus::values::{JobResult, JobType};
use portcullis::fleet::systemd::{JobRequest, QueuedJob, Systemd, UnitControl as _};
use zbus::connection::Builder;
use zbus::message::Type;
use zbus::names::WellKnownName;
use zbus::{Connection, Message, MessageStream, ObjectPath};

use crate::agent::properties;
use crate::world::{Daemon, soon};

const SYSTEMD: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";

fn unit_path(unit: &str) -> ObjectPath<'static> {
    // Only the names in this file are escaped.
    let escaped = unit.replace('.', "_2e");
    ObjectPath::try_from(format!("{PATH}/unit/{escaped}")).unwrap()
}

fn job_path(id: u32) -> ObjectPath<'static> {
    ObjectPath::try_from(format!("{PATH}/job/{id}")).unwrap()
}

/// Answers calls: every job has the number 7, and `alias.service` is a name of `real.service`,
/// which is active.
async fn answer(connection: Connection, mut calls: MessageStream) {
    while let Some(Ok(call)) = calls.next().await {
        if call.message_type() != Type::MethodCall {
            continue;
        }
        let (header, body) = (call.header(), call.body());
        let replied = match header.member().unwrap().as_str() {
            "StartUnit" => connection.reply(&header, &job_path(7)).await,
            "LoadUnit" => {
                let unit: &str = body.deserialize().unwrap();
                let unit = if unit == "alias.service" { "real.service" } else { unit };
                connection.reply(&header, &unit_path(unit)).await
            }
            "GetAll" => connection.reply(&header, &properties("inactive")).await,
            _ => connection.reply_error(&header, UNKNOWN_METHOD, &"not played").await,
        };
        replied.unwrap();
    }
}

struct World {
    systemd: Systemd,
    played: Connection,
    _daemon: Daemon,
    _dir: tempfile::TempDir,
}

impl World {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(&dir);
        let played = Builder::address(daemon.address.as_str()).build().await.unwrap();
        tokio::spawn(answer(played.clone(), MessageStream::from(&played)));
        played.request_name(WellKnownName::try_from(SYSTEMD).unwrap()).await.unwrap();
        let (systemd, _) = Systemd::connect(Bus::Address(daemon.address.clone()));
        Self { systemd, played, _daemon: daemon, _dir: dir }
    }

    async fn start_unit(&self, unit: &str) -> Result<QueuedJob, CallError> {
        soon("a job", self.systemd.queue_job(JobRequest::new(JobType::Start, unit, "replace"))).await
    }

    /// Reports the end of the job with the number 7.
    async fn removed(&self, unit: &str, result: &str) {
        let signal = Message::signal(PATH, "org.freedesktop.systemd1.Manager", "JobRemoved");
        let signal = signal.build(&(7_u32, job_path(7), unit, result)).unwrap();
        self.played.send(&signal).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_result_of_a_job_is_that_of_its_unit() {
    let world = World::start().await;
    for (unit, ended, expected) in [
        ("a.service", "a.service", JobResult::Timeout),
        ("alias.service", "real.service", JobResult::Timeout),
        // The number of the job is that of another unit's job, of a systemd that has restarted. The
        // state of the unit tells the result.
        ("a.service", "b.service", JobResult::Failed),
    ] {
        let job = world.start_unit(unit).await.unwrap();
        world.removed(ended, "timeout").await;
        assert_eq!(soon("a result", job.done).await.unwrap(), expected, "{unit} {ended}");
    }
}
