//! Tests of requests that the provider refuses: a refused rule does not hold back the other rules
//! of its request, and a denied request is sent again at most once a minute.

use super::*;
use portcullis_provider::memory::Call;
use portcullis_provider::rule::RuleSet;

/// The length of a test and the interval between full reads, in simulated seconds.
const LONG: u64 = 150;
const RESYNC: u64 = 2;

fn has_port(call: &Call, port: u16) -> bool {
    call.rules.iter().any(|rule| rule.ports.from() <= port && port <= rule.ports.to())
}

/// Makes the provider refuse each request of this name that contains this port.
fn refuse(provider: &Memory, name: CallName, port: u16) {
    provider.set_script(move |call| {
        let what = Subject::Machine(call.machine.unwrap_or(MachineNumber::new(0)));
        let refused = ProviderError::Invalid { what, reason: "InvalidParameterValue".to_owned() };
        (call.name == name && has_port(call, port)).then_some(Fault::Before(Failure::Error(refused)))
    });
}

/// The open ports, regardless of the number of rules: the search for a refused port splits a range.
fn joined(world: &World) -> Vec<String> {
    let owned = world.provider.actual(MachineNumber::new(0)).unwrap().owned;
    let of_v4 = owned.into_iter().filter(|rule| rule.source == Cidr::WORLD_V4);
    of_v4.collect::<RuleSet>().rules().map(|rule| rule.ports.to_string()).collect()
}

/// Runs passes for as long as the agent is due again at once.
async fn settle(world: &mut World) {
    world.pass().await;
    for _ in 0..40 {
        if world.controller.next_retry().is_none_or(|at| at > Instant::now()) {
            return;
        }
        world.lease.confirm(world.operator.tree()).await.unwrap();
        world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    }
    panic!("the controller never settles: {:?}", world.problem(0));
}

#[tokio::test(start_paused = true)]
async fn ports_beside_a_refused_port_open_at_once() {
    for (ports, refused, open) in [
        (&["80", "90", "443", "8080"][..], 90, &["80/tcp", "443/tcp", "8080/tcp"][..]),
        (&["80", "90", "443", "8080"], 80, &["90/tcp", "443/tcp", "8080/tcp"]),
        (&["80", "81", "82", "443"], 81, &["80/tcp", "82/tcp", "443/tcp"]),
        (&["1000-1100", "443"], 1042, &["443/tcp", "1000-1041/tcp", "1043-1100/tcp"]),
        (&["80"], 80, &[]),
    ] {
        let mut world = World::new().await;
        let unit = world.deploy("a").await;
        for port in ports {
            world.open(unit, port).await;
        }
        world.expose("a").await;
        refuse(&world.provider, CallName::Open, refused);
        let began = Instant::now();
        settle(&mut world).await;
        assert_eq!(joined(&world), open, "{ports:?} without {refused}");
        assert!(began.elapsed() < Duration::from_secs(1), "at once: {:?}", began.elapsed());
        let problem = world.problem(0).unwrap_or_default();
        assert!(problem.contains(&format!("{refused}/tcp")), "{problem}");
        let report = world.controller.reports.get(MachineId::new(0)).unwrap();
        assert_eq!(report.pending.len(), 2, "only the refused port, for both families: {report:?}");

        // The provider accepts the port from now on: the agent retries it without a new event.
        world.provider.clear_script();
        tokio::time::advance(Duration::from_secs(100)).await;
        settle(&mut world).await;
        assert_eq!(world.problem(0), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_port_opens_beside_a_port_that_was_refused_before() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.open(unit, "90").await;
    world.expose("a").await;
    refuse(&world.provider, CallName::Open, 90);
    settle(&mut world).await;
    let before = world.provider.calls_of(CallName::Open);
    world.open(unit, "443").await;
    world.pass_for(Key::Unit(unit)).await;
    assert_eq!(world.rules(0), ["80/tcp", "443/tcp"]);
    assert_eq!(world.provider.calls_of(CallName::Open), before + 1, "without the refused port");
}

#[tokio::test(start_paused = true)]
async fn rules_beside_a_refused_close_are_closed_at_once() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    for port in ["80", "90", "443", "8080"] {
        world.open(unit, port).await;
    }
    world.expose("a").await;
    settle(&mut world).await;
    refuse(&world.provider, CallName::Close, 90);
    for port in ["80", "90", "443"] {
        world.close(unit, port).await;
    }
    settle(&mut world).await;
    assert_eq!(world.rules(0), ["90/tcp", "8080/tcp"]);
}

/// Reads everything every two seconds; returns how many requests of this name were sent.
async fn requests_in(world: &mut World, name: CallName, seconds: u64) -> usize {
    let before = world.provider.calls_of(name);
    for _ in 0..seconds / RESYNC {
        world.pass().await;
        tokio::time::advance(Duration::from_secs(RESYNC)).await;
    }
    world.provider.calls_of(name) - before
}

#[tokio::test(start_paused = true)]
async fn a_denied_request_is_sent_once_a_minute_whatever_the_resync() {
    for name in [CallName::Open, CallName::Close, CallName::Observe] {
        let mut world = World::new().await;
        let unit = world.deploy("a").await;
        world.open(unit, "80").await;
        world.expose("a").await;
        if name == CallName::Close {
            world.pass().await;
            world.operator.unexpose(&"a".parse().unwrap()).await.unwrap();
        }
        world.provider.set_script(move |call| {
            let (what, reason) = (Subject::Provider, "UnauthorizedOperation".to_owned());
            let denied = Failure::Error(ProviderError::Denied { what, reason });
            (call.name == name).then_some(Fault::Before(denied))
        });
        let sent = requests_in(&mut world, name, LONG).await;
        assert!((1..=3).contains(&sent), "{name:?}: {sent} in {LONG} s");
        assert!(world.problem(0).unwrap_or_default().contains("UnauthorizedOperation"), "{name:?}");
        world.provider.clear_script();
        requests_in(&mut world, name, 120).await;
        let open: &[&str] = if name == CallName::Close { &[] } else { &["80/tcp"] };
        assert_eq!(
            (world.rules(0), world.problem(0)),
            (open.iter().map(ToString::to_string).collect(), None)
        );
    }
}

/// IAM may allow one of the two requests and deny the other.
#[tokio::test(start_paused = true)]
async fn a_denied_open_does_not_hold_back_a_close() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.provider.set_script(|call| {
        let (what, reason) = (Subject::Provider, "UnauthorizedOperation".to_owned());
        let denied = Failure::Error(ProviderError::Denied { what, reason });
        (call.name == CallName::Open).then_some(Fault::Before(denied))
    });
    world.open(unit, "443").await;
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    world.close(unit, "80").await;
    world.pass().await;
    assert_eq!(world.rules(0), Vec::<String>::new());
    let report = world.controller.reports.get(MachineId::new(0)).unwrap();
    assert!(report.is_pending() && report.problem.is_some(), "{report:?}");
}

/// If a machine was to be read again at once and that read is denied, the pause after a denial
/// applies.
#[tokio::test(start_paused = true)]
async fn a_denied_read_replaces_an_earlier_retry() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    let conflict = ProviderError::Conflict { what: Subject::Provider };
    let denied =
        ProviderError::Denied { what: Subject::Provider, reason: "UnauthorizedOperation".to_owned() };
    world.provider.fail_at(2, Fault::Before(Failure::Error(conflict)));
    world.provider.fail_at(3, Fault::Before(Failure::Error(denied)));
    world.pass().await;
    for _ in 0..2 {
        world.lease.confirm(world.operator.tree()).await.unwrap();
        world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
        assert!(world.controller.next_retry().unwrap() >= Instant::now() + Duration::from_secs(59));
    }
}
