//! Unit files and policies, and the files that are not replaced.

use super::*;

fn asked(hook_user: &str) -> Args {
    Args {
        roles: vec![Role::Up],
        environment: "local".to_owned(),
        hook_user: hook_user.to_owned(),
        listen: None,
        heartbeat: None,
        fleet: None,
        firewall: None,
        provider: Provider::Ec2,
        ec2_settings: None,
        config: None,
        tls: TlsFiles::default(),
        bus_group: None,
        user: false,
        directory: None,
        dbus_directory: PathBuf::new(),
    }
}

#[test]
fn the_unit_file_of_a_controller_names_its_provider() {
    let local: EnvironmentName = "prod".parse().unwrap();
    let text = |provider, settings: Option<&str>| {
        let args = Args { provider, ec2_settings: settings.map(PathBuf::from), ..asked("web") };
        unit_file(Role::Controller, Path::new("/portcullis"), &local, &args).map_err(|e| e.to_string())
    };
    let memory = text(Provider::Memory, None).unwrap();
    assert!(memory.contains(" controller -e prod --provider memory\n") && !memory.contains("aws.env"));
    assert!(text(Provider::Memory, Some("/a")).unwrap_err().contains("requires an EC2 provider"));
    let real = text(Provider::Ec2, Some("/etc/a b.yaml"));
    if cfg!(feature = "ec2") {
        let real = real.unwrap();
        let command = " controller -e prod --provider ec2 --ec2-settings \"/etc/a b.yaml\"\n";
        assert!(
            real.contains(command) && real.contains("\nEnvironmentFile=-/etc/portcullis/aws.env\n"),
            "{real}"
        );
        assert!(
            text(Provider::DryRun, Some("/a%b")).unwrap_err().contains("cannot be written in a unit file")
        );
    } else {
        assert_eq!(real.unwrap_err(), "this build does not support EC2");
    }
}

#[test]
fn options_of_up_are_part_of_its_command() {
    let local: EnvironmentName = "local".parse().unwrap();
    let text = |args: &Args| unit_file(Role::Up, Path::new("/p"), &local, args).unwrap();
    assert!(text(&asked("web")).contains(" up -e local --hook-user web "));
    let mut args = Args {
        listen: Some("10.88.0.1:2181".parse().unwrap()),
        heartbeat: Some("[fd00::1]:28500".parse().unwrap()),
        fleet: Some("10.88.0.1:842".parse().unwrap()),
        firewall: Some(Kind::NftablesAcceptOnly),
        ..asked("web")
    };
    let command = " up -e local --listen 10.88.0.1:2181 --heartbeat [fd00::1]:28500 --fleet \
                   10.88.0.1:842 --firewall nftables-accept-only --hook-user web ";
    assert!(text(&args).contains(command), "{}", text(&args));
    assert!(check(&args).is_ok());
    args.roles = vec![Role::Keeper];
    assert!(check(&args).unwrap_err().to_string().contains("for the role up"));
}

#[test]
fn unit_files_keep_processes_of_hooks_running() {
    let local: EnvironmentName = "prod".parse().unwrap();
    let text = |role| unit_file(role, Path::new("/usr/bin/portcullis"), &local, &asked("200000+")).unwrap();
    let machine = text(Role::Machine);
    let start = "ExecStart=\"/usr/bin/portcullis\" --log-level info machine -e prod --id %i --firewall \
                 nftables --hook-user 200000+ --units-dir /var/lib/portcullis-units/prod-%i\n";
    assert!(machine.contains(start) && machine.contains("\nKillMode=process\n"), "{machine}");
    assert!(text(Role::Up).contains("KillMode=process") && !text(Role::Keeper).contains("KillMode"));
    assert!(unit_file(Role::Up, Path::new("/a\"b"), &local, &asked("web")).is_err());
    for user in ["", "a b", "%i", "a\nExecStart=/bin/sh"] {
        assert!(unit_file(Role::Up, Path::new("/a"), &local, &asked(user)).is_err(), "{user}");
    }
}

#[test]
fn managers_and_agents_have_unit_files() {
    let prod: EnvironmentName = "prod".parse().unwrap();
    let user = Args { user: true, ..asked("web") };
    for (role, args, command) in [
        (Role::Manager, &asked("web"), "manager -e prod --bus system"),
        (Role::Manager, &user, "manager -e prod --bus user"),
        (Role::Agent, &asked("web"), "agent --config %E/portcullis/agent.conf --bus system"),
        (Role::Agent, &user, "agent --config %E/portcullis/agent.conf --bus user"),
    ] {
        let text = unit_file(role, Path::new("/p"), &prod, args).unwrap();
        assert!(text.contains(&format!("\nExecStart=\"/p\" --log-level info {command}\n")), "{text}");
        assert_eq!(text.contains("WantedBy=default.target"), args.user);
    }
}

#[test]
fn options_must_fit_the_roles() {
    let (manager, agent, up) = (Role::Manager, Role::Agent, Role::Up);
    let config = Some(PathBuf::from("/c"));
    let group = |name: &str| Some(name.to_owned());
    for (args, accepted) in [
        (Args { roles: vec![manager, agent], user: true, ..asked("web") }, true),
        (Args { roles: vec![manager, up], user: true, ..asked("web") }, false),
        (Args { roles: vec![manager], config: config.clone(), ..asked("web") }, true),
        (Args { roles: vec![manager, agent], config: config.clone(), ..asked("web") }, false),
        (Args { roles: vec![up], config, ..asked("web") }, false),
        (Args { roles: vec![manager], bus_group: group("fleet"), ..asked("web") }, true),
        (Args { roles: vec![agent], bus_group: group("fleet"), ..asked("web") }, false),
        (Args { roles: vec![manager], bus_group: group("a\"/><"), ..asked("web") }, false),
    ] {
        assert_eq!(check(&args).is_ok(), accepted, "{args:?}");
    }
}

#[cfg(feature = "fleet")]
#[test]
fn the_policy_is_written_for_the_system_bus_only() {
    let home = tempfile::tempdir().unwrap();
    let (units, dbus) = (home.path().join("units"), home.path().join("dbus"));
    let typed = |user| Args {
        roles: vec![Role::Manager],
        user,
        directory: Some(units.clone()),
        dbus_directory: dbus.clone(),
        ..asked("web")
    };
    run(&typed(true)).unwrap();
    assert!(units.join("portcullis-manager.service").exists() && !dbus.exists());
    run(&typed(false)).unwrap();
    let path = dbus.join(POLICY_FILE);
    assert!(fs::read_to_string(&path).unwrap().starts_with(POLICY_MARK));
    // A policy of another program prevents all writes.
    fs::write(&path, "<busconfig/>").unwrap();
    fs::remove_file(units.join("portcullis-manager.service")).unwrap();
    assert!(run(&typed(false)).unwrap_err().to_string().contains("is not replaced"));
    assert!(!units.join("portcullis-manager.service").exists());
}

#[test]
fn unit_files_of_other_programs_are_not_replaced() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("system");
    let typed = Args { directory: Some(directory.clone()), ..asked("web") };
    for _ in 0..2 {
        run(&typed).unwrap();
    }
    let path = directory.join("portcullis.service");
    assert!(fs::read_to_string(&path).unwrap().starts_with(MARK));
    fs::write(&path, "[Unit]\n").unwrap();
    let refused = run(&typed).unwrap_err().to_string();
    assert!(refused.ends_with("was not written by this command and is not replaced"), "{refused}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "[Unit]\n");
}

#[test]
fn the_service_of_another_environment_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let of = |role, environment: &str, user: &str| Args {
        roles: vec![role],
        environment: environment.to_owned(),
        directory: Some(directory.path().to_owned()),
        provider: Provider::Memory,
        ..asked(user)
    };
    for role in [Role::Machine, Role::Up, Role::Controller] {
        run(&of(role, "prod", "web")).unwrap();
        run(&of(role, "prod", "nobody")).unwrap();
        let path = directory.path().join(role.file());
        let refused = run(&of(role, "test", "web")).unwrap_err().to_string();
        let expected = format!(
            "{} is the service of environment 'prod'; remove it first, or choose another --directory",
            path.display()
        );
        assert_eq!(refused, expected);
        assert!(fs::read_to_string(path).unwrap().contains(" -e prod "));
    }
    // The keeper serves any environment.
    run(&of(Role::Keeper, "prod", "web")).unwrap();
    run(&of(Role::Keeper, "test", "web")).unwrap();
}
