//! A machine keeps its files up to date while an issuer answers.

use super::*;
use crate::identity::issuer::Issuer;
use crate::identity::issuer::tests::World;
use crate::net::tls::authority::Names;
use crate::runtime::clock::wall_ms;

#[tokio::test(start_paused = true)]
async fn the_files_follow_the_certificate_in_the_store() {
    let world = World::new().await;
    let (machine, tree) = world.machine().await;
    let home = tempfile::tempdir().unwrap();
    let files = MachineIdentity::new(home.path().to_owned(), machine.id);
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let issuer = Issuer::new(world.controller.clone(), world.authority(), wall_ms).run(stopped);
    let watching = async {
        let certificate = async |old: Option<&Certificate>| {
            loop {
                sleep(Duration::from_millis(10)).await;
                if let Some(found) = files.certificate().unwrap().filter(|found| Some(found) != old) {
                    return found;
                }
            }
        };
        let first = certificate(None).await;
        assert_eq!(first.names(), &Names::of(["machine-0"]));
        assert_eq!(std::fs::read_to_string(files.ca()).unwrap(), world.authority.certificate());
        // An operator asks for a new certificate.
        std::fs::remove_file(files.files().certificates).unwrap();
        assert!(world.operator.renew_certificate(machine.id).await.unwrap());
        certificate(None).await
    };
    tokio::select! {
        never = machine.keep_certificate(&tree, &files) => match never {},
        ended = issuer => panic!("{ended:?}"),
        second = watching => assert_eq!(second.names(), &Names::of(["machine-0"])),
    }
}
