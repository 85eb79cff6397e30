//! The keeper on damaged, failing and full disks, and after power cuts. Acknowledged writes are
//! present after the next start, or the keeper refuses to start and reports where the damage is.
//! The tests mount file systems, so they run as root.

#[path = "../harness/mod.rs"]
mod harness;

mod damage;
mod failing;
mod mounts;
mod power;

use harness::wire::{Client, Create, Lost, Put, Take, create_body, op};

/// The error code of writes on a full disk.
pub(crate) const QUOTA_EXCEEDED: i32 = -125;

/// Creates `/n0`, `/n1`, ... from `first` on until the server closes the connection, reports a full
/// disk, or `limit` is reached; returns how many of them were acknowledged.
pub(crate) fn create_until_lost(client: &mut Client, first: usize, limit: usize, data: &[u8]) -> usize {
    for number in first..limit {
        match client.try_call(op::CREATE, &create_body(&format!("/n{number}"), data, Create::Persistent)) {
            Ok(reply) if reply.err == QUOTA_EXCEEDED => return number,
            Ok(reply) => assert_eq!(reply.err, 0, "create /n{number}"),
            Err(Lost::Closed) => return number,
            Err(Lost::Silent) => panic!("the server neither replies nor closes the connection"),
        }
    }
    limit
}

/// Counts the nodes `/n0`, `/n1`, ... Panics if one is missing between them.
pub(crate) fn count_created(client: &mut Client) -> usize {
    let reply = client.call(op::GET_CHILDREN, &Put::new().bytes("/").bool(false));
    let mut take = Take(&reply.body);
    let names: Vec<String> = (0..take.int()).map(|_| take.string()).collect();
    let mut numbers: Vec<usize> =
        names.iter().filter_map(|name| name.strip_prefix('n')?.parse().ok()).collect();
    numbers.sort_unstable();
    assert!(numbers.iter().enumerate().all(|(at, number)| at == *number), "a hole in {numbers:?}");
    numbers.len()
}
