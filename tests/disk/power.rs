//! Power cuts: unsynced data is lost, acknowledged writes are not.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::count_created;
use crate::harness::wire::{Client, Create, create_body, op};
use crate::harness::{Kind, Options, Store, wait_for};
use crate::mounts::{Mount, data_dir};

/// Writes until the power cut; returns the number of acknowledged writes, including earlier ones.
fn write_until_cut(store: &mut Store, mount: &Mount, first: usize) -> usize {
    let acknowledged = Arc::new(AtomicUsize::new(first));
    let (addr, counter) = (store.addr(), acknowledged.clone());
    let writer = std::thread::spawn(move || {
        let mut client = Client::connect(addr);
        for number in first.. {
            let body = create_body(&format!("/n{number}"), b"data", Create::Persistent);
            match client.try_call(op::CREATE, &body) {
                Ok(reply) if reply.err == 0 => counter.store(number + 1, Ordering::SeqCst),
                Ok(reply) => panic!("create /n{number}: {}", reply.err),
                Err(_) => return,
            }
        }
    });
    wait_for("some writes", Duration::from_secs(30), || {
        (acknowledged.load(Ordering::SeqCst) >= first + 30).then_some(())
    });
    mount.cut_power();
    // The next sync of the server fails, so the server stops, which also stops the writer.
    let status = store.wait_exit(Duration::from_secs(20));
    assert!(status.code() != Some(0), "runs without a disk: {status}");
    writer.join().expect("the writer");
    acknowledged.load(Ordering::SeqCst)
}

#[test]
fn acknowledged_writes_survive_power_cuts() {
    let mut mount = Mount::ext4();
    let options = Options { data_dir: Some(data_dir(&mount)), ..Options::default() };
    let mut store = Store::start(Kind::Keeper, options);
    let mut there = 0;
    for cut in 0..5 {
        let acknowledged = write_until_cut(&mut store, &mount, there);
        mount.remount();
        store.restart();
        there = count_created(&mut Client::connect(store.addr()));
        assert!(there >= acknowledged, "cut {cut}: {acknowledged} acknowledged, {there} there");
    }
    store.sigterm();
}

/// Control: with a sync that does nothing, writes must be lost. Otherwise the test above could not
/// detect a loss.
#[test]
fn disabled_sync_loses_writes() {
    let mut mount = Mount::ext4();
    let line = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "-e"];
    let mut wrapper = line.map(str::to_owned).to_vec();
    wrapper.push("inject=fdatasync:retval=0".to_owned());
    let lying = Options { wrapper, data_dir: Some(data_dir(&mount)), ..Options::default() };
    let mut store = Store::start(Kind::Keeper, lying.clone());
    let mut client = Client::connect(store.addr());
    for number in 0..50 {
        client.create(&format!("/n{number}"), b"data", Create::Persistent);
    }
    mount.cut_power();
    store.kill9();
    mount.remount();
    store.set_options(Options { wrapper: Vec::new(), ..lying });
    store.restart();
    let there = count_created(&mut Client::connect(store.addr()));
    assert!(there < 50, "all {there} writes are present without a sync");
    store.sigterm();
}
