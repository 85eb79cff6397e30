//! Runs the `nft` program with limits on time and output. Rules do not belong here: it passes text
//! in and out.

use super::table::TableName;
use crate::error::{Error, Subject};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

/// Size limit of a listing: five times the listing of all single ports of both protocols.
const MAX_LISTING_BYTES: usize = 32 * 1024 * 1024;
/// Size limit of nft's error message.
const MAX_COMPLAINT_BYTES: usize = 4096;
const SHOWN_COMPLAINT_CHARS: usize = 300;

#[derive(Debug)]
pub(super) struct Nft {
    command: Vec<String>,
    time_limit: Duration,
    what: Subject,
    listed: AtomicU64,
    loaded: AtomicU64,
}

struct Ended {
    status: ExitStatus,
    listing: Vec<u8>,
    complaint: String,
}

enum Broken {
    Start(io::Error),
    Talk(io::Error),
    Time,
    Size,
}

impl Nft {
    pub(super) fn new(command: Vec<String>, time_limit: Duration, what: Subject) -> Self {
        Self { command, time_limit, what, listed: AtomicU64::new(0), loaded: AtomicU64::new(0) }
    }

    /// Returns the number of runs by purpose.
    pub(super) fn started(&self) -> BTreeMap<String, u64> {
        let counts = [("list", &self.listed), ("load", &self.loaded)];
        counts.map(|(name, count)| (name.to_owned(), count.load(Ordering::Relaxed))).into()
    }

    /// Returns the listing of a table; `None` if it does not exist. Existence is checked by listing
    /// all names, so that it does not depend on an error message.
    pub(super) async fn list(&self, table: &TableName) -> Result<Option<String>, Error> {
        let ended = self.read(&["-j", "list", "table", "inet", table.as_str()]).await?;
        if ended.status.success() {
            return self.text(ended).map(Some);
        }
        let names = self.read(&["-j", "list", "tables", "inet"]).await?;
        if !names.status.success() {
            return Err(self.refused(&names, |what, reason| Error::Unusable { what, reason }));
        }
        let names = self.text(names)?;
        let unreadable = |error| self.unusable(format!("its list of tables is not JSON: {error}"));
        let names: Value = serde_json::from_str(&names).map_err(unreadable)?;
        let objects = names.get("nftables").and_then(Value::as_array);
        let objects =
            objects.ok_or_else(|| self.unusable("its list of tables has no 'nftables'".to_owned()))?;
        let is_there = objects
            .iter()
            .any(|object| object.pointer("/table/name").and_then(Value::as_str) == Some(table.as_str()));
        if is_there {
            return Err(self.refused(&ended, |what, reason| Error::Unavailable { what, reason }));
        }
        Ok(None)
    }

    /// Loads a ruleset as one transaction.
    pub(super) async fn load(&self, ruleset: &str) -> Result<(), Error> {
        self.loaded.fetch_add(1, Ordering::Relaxed);
        let ended = self.run(&["-j", "-f", "-"], ruleset.as_bytes()).await;
        let ended = ended.map_err(|broken| match broken {
            Broken::Time => self.late(|what, reason| Error::Ambiguous { what, reason }),
            Broken::Talk(error) => {
                Error::Ambiguous { what: self.what.clone(), reason: format!("lost touch with nft: {error}") }
            }
            other => self.not_run(other),
        })?;
        if ended.status.success() {
            return Ok(());
        }
        Err(self.refused(&ended, |what, reason| Error::Invalid { what, reason }))
    }

    async fn read(&self, arguments: &[&str]) -> Result<Ended, Error> {
        self.listed.fetch_add(1, Ordering::Relaxed);
        self.run(arguments, b"").await.map_err(|broken| self.not_run(broken))
    }

    fn not_run(&self, broken: Broken) -> Error {
        match broken {
            Broken::Start(error) if error.kind() == io::ErrorKind::NotFound => self
                .unusable(format!("the program '{}' was not found; is nftables installed?", self.program())),
            Broken::Start(error) => self.unusable(format!("'{}' cannot be started: {error}", self.program())),
            Broken::Talk(error) => Error::Unavailable {
                what: self.what.clone(),
                reason: format!("lost touch with nft: {error}"),
            },
            Broken::Time => self.late(|what, reason| Error::Unavailable { what, reason }),
            Broken::Size => self.unusable(format!("nft says more than {MAX_LISTING_BYTES} bytes")),
        }
    }

    fn late(&self, kind: fn(Subject, String) -> Error) -> Error {
        kind(self.what.clone(), format!("nft took longer than {:?} and was ended", self.time_limit))
    }

    /// Converts a failed run. A missing right is reported as denied, any other failure by
    /// `otherwise`. Neither is retried, so the message of nft only decides which text is printed.
    fn refused(&self, ended: &Ended, otherwise: fn(Subject, String) -> Error) -> Error {
        let lines = ended.complaint.split_whitespace().collect::<Vec<_>>().join(" ");
        let words: String = lines.chars().take(SHOWN_COMPLAINT_CHARS).collect();
        if words.contains("Operation not permitted") {
            let reason = "nft needs the right to administer the network (root or CAP_NET_ADMIN)".to_owned();
            return Error::Denied { what: self.what.clone(), reason };
        }
        otherwise(self.what.clone(), format!("nft ended with {}: {words}", ended.status))
    }

    fn text(&self, ended: Ended) -> Result<String, Error> {
        String::from_utf8(ended.listing).map_err(|_| self.unusable("nft's listing is not UTF-8".to_owned()))
    }

    fn unusable(&self, reason: String) -> Error {
        Error::Unusable { what: self.what.clone(), reason }
    }

    fn program(&self) -> &str {
        self.command.first().map_or("", String::as_str)
    }

    async fn run(&self, arguments: &[&str], input: &[u8]) -> Result<Ended, Broken> {
        let mut child = Command::new(self.program())
            .args(self.command.iter().skip(1))
            .args(arguments)
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(Broken::Start)?;
        match tokio::time::timeout(self.time_limit, talk(&mut child, input)).await {
            Ok(result) => result,
            Err(_) => Err(Broken::Time),
        }
    }
}

async fn talk(child: &mut Child, input: &[u8]) -> Result<Ended, Broken> {
    let (stdin, listing, complaint) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let write = async {
        let Some(mut stdin) = stdin else { return Ok(()) };
        match stdin.write_all(input).await {
            // The program ended without reading its input; its exit status is more useful.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    };
    let (listing, complaint, ()) =
        tokio::try_join!(read(listing, MAX_LISTING_BYTES), read(complaint, MAX_COMPLAINT_BYTES), write)
            .map_err(Broken::Talk)?;
    if listing.len() > MAX_LISTING_BYTES {
        return Err(Broken::Size);
    }
    let complaint = String::from_utf8_lossy(&complaint).into_owned();
    let status = child.wait().await.map_err(Broken::Talk)?;
    Ok(Ended { status, listing, complaint })
}

/// Reads at most one byte more than `limit`.
async fn read(from: Option<impl AsyncRead + Unpin>, limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(limit as u64 + 1).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}
