//! Clients that work through crashes of the server and record what they observe. Checking the
//! record does not belong here.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::history::{Operation, Outcome};
use crate::harness::wait_for;
use crate::harness::wire::{Client, Create, Hello, Lost, Put, Take, create_body, op, set_body};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) addr: SocketAddr,
    pub(crate) start: Instant,
    pub(crate) stop: AtomicBool,
    /// Writes that the server has acknowledged so far, over all clients.
    pub(crate) acknowledged: AtomicUsize,
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).expect("a short test")
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Opens a session as soon as the server runs; returns `None` when the test is over.
    fn connect(&self) -> Option<Client> {
        wait_for("server to come back", Duration::from_secs(60), || {
            if self.stopped() {
                return Some(None);
            }
            Client::try_connect(self.addr, &Hello { timeout_ms: 40_000, ..Hello::default() }).ok().map(Some)
        })
    }
}

/// Repeatedly reads a register and replaces its value with compare-and-swap.
#[derive(Debug)]
pub(crate) struct Register {
    shared: Arc<Shared>,
    client: usize,
    path: String,
    history: Vec<Operation>,
    next: usize,
}

impl Register {
    pub(crate) fn new(shared: Arc<Shared>, client: usize, register: usize) -> Self {
        Self { shared, client, path: format!("/r{register}"), history: Vec::new(), next: 0 }
    }

    pub(crate) fn run(mut self) -> Vec<Operation> {
        while let Some(mut connection) = self.shared.connect() {
            while !self.shared.stopped() && self.step(&mut connection).is_ok() {}
        }
        self.history
    }

    fn step(&mut self, connection: &mut Client) -> Result<(), Lost> {
        let invoked = self.shared.now();
        let reply = connection.try_call(op::GET_DATA, &Put::new().bytes(&self.path).bool(false))?;
        assert_eq!(reply.err, 0, "read of {}", self.path);
        let mut take = Take(&reply.body);
        let value = take.bytes().to_vec();
        let version = take.stat().version;
        self.record(invoked, Outcome::Read { value, version });

        let value = format!("{}.{}", self.client, self.next).into_bytes();
        self.next += 1;
        let invoked = self.shared.now();
        let outcome = match connection.try_call(op::SET_DATA, &set_body(&self.path, &value, version)) {
            Ok(reply) if reply.err == 0 => {
                self.shared.acknowledged.fetch_add(1, Ordering::SeqCst);
                Outcome::Written { value, version: Take(&reply.body).stat().version }
            }
            Ok(reply) if reply.err == -103 => Outcome::Refused { expected: version },
            Ok(reply) => panic!("write of {}: {}", self.path, reply.err),
            Err(lost) => {
                self.record(invoked, Outcome::Unknown { value, expected: version });
                return Err(lost);
            }
        };
        self.record(invoked, outcome);
        Ok(())
    }

    fn record(&mut self, invoked: u64, outcome: Outcome) {
        self.history.push(Operation { invoked, answered: self.shared.now(), outcome });
    }
}

/// Creates sequential nodes and deletes some of them.
#[derive(Debug)]
pub(crate) struct Names {
    shared: Arc<Shared>,
    kept: Vec<String>,
    deleted: Vec<String>,
    made: usize,
}

impl Names {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, kept: Vec::new(), deleted: Vec::new(), made: 0 }
    }

    pub(crate) fn run(mut self) -> Self {
        let mut last = String::new();
        while let Some(mut connection) = self.shared.connect() {
            while !self.shared.stopped() && self.step(&mut connection, &mut last).is_ok() {}
        }
        self
    }

    fn step(&mut self, connection: &mut Client, last: &mut String) -> Result<(), Lost> {
        let reply = connection.try_call(op::CREATE, &create_body("/seq/n-", b"", Create::Sequential))?;
        assert_eq!(reply.err, 0, "create below /seq");
        let name = Take(&reply.body).string();
        assert!(name > *last, "{name} after {last}");
        last.clone_from(&name);
        self.made += 1;
        if !self.made.is_multiple_of(3) {
            self.kept.push(name);
            return Ok(());
        }
        // Without a reply the node may exist or not: it is added to neither list.
        let reply = connection.try_call(op::DELETE, &Put::new().bytes(&name).int(0))?;
        assert_eq!(reply.err, 0, "delete {name}");
        self.deleted.push(name);
        Ok(())
    }

    /// Checks that created nodes exist and deleted nodes do not.
    pub(crate) fn check(&self, reader: &mut Client) {
        let reply = reader.call(op::GET_CHILDREN, &Put::new().bytes("/seq").bool(false));
        let mut take = Take(&reply.body);
        let there: BTreeSet<String> = (0..take.int()).map(|_| format!("/seq/{}", take.string())).collect();
        assert!(self.kept.len() > 100, "only {} names were made", self.kept.len());
        for name in &self.kept {
            assert!(there.contains(name), "{name} is lost");
        }
        for name in &self.deleted {
            assert!(!there.contains(name), "{name} was deleted and exists");
        }
    }
}
