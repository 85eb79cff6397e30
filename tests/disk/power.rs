//! Power cuts: what the server had not synced is gone, what it had acknowledged is not.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::count_created;
use crate::harness::wire::{Client, Create, create_body, op};
use crate::harness::{Kind, Options, Store, wait_for};
use crate::mounts::{Mount, data_dir};

/// Writes until the power goes; gives how many writes were acknowledged, counting those before.
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
    // The server notices at its next sync and ends by itself, which ends the writer.
    let status = store.wait_exit(Duration::from_secs(20));
    assert!(status.code() != Some(0), "goes on without a disk: {status}");
    writer.join().expect("the writer");
    acknowledged.load(Ordering::SeqCst)
}

#[test]
fn nothing_acknowledged_is_lost_in_power_cuts() {
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

/// The same with a sync that only says that it synced: if nothing were lost now, the test above could not see a loss.
#[test]
fn a_sync_that_lies_is_found_out() {
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
    assert!(there < 50, "all {there} writes are there without a single sync");
    store.sigterm();
}
