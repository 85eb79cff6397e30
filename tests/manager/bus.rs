//! The manager's name on a bus, and signals with a false sender.

use portcullis::fleet::dbus::bus::Bus;
use portcullis::fleet::dbus::names::BUS_NAME;
use portcullis::fleet::manager::bus::{BusConnection, BusError};
use zbus::Message;
use zbus::names::OwnedUniqueName;

use crate::monitors::monitor;
use crate::world::{Client, MANAGER, World};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_manager_does_not_take_the_name() {
    let world = World::start(&["n1"]).await;
    let client = world.client().await;
    let second = BusConnection::connect(&Bus::Address(world.bus.clone())).await;
    assert!(matches!(second, Err(BusError::NameTaken)), "{second:?}");
    client.call(MANAGER, "ListNodes", &()).await.unwrap();
    // The name is free again when its owner stops.
    world.stop().await;
    BusConnection::connect(&Bus::Address(world.bus.clone())).await.unwrap();
}

async fn owner(client: &Client) -> OwnedUniqueName {
    let bus = zbus::fdo::DBusProxy::new(&client.connection).await.unwrap();
    bus.get_name_owner(BUS_NAME.try_into().unwrap()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_false_signal_about_a_lost_client_is_ignored() {
    let world = World::start(&["n1"]).await;
    let client = world.client().await;
    let path = monitor(&client).await;
    let own = client.connection.unique_name().unwrap().to_string();
    let forger = world.client().await;
    let forged = Message::signal("/org/freedesktop/DBus", "org.freedesktop.DBus", "NameOwnerChanged")
        .destination(owner(&client).await.into_inner())
        .build(&(own.as_str(), own.as_str(), ""))
        .unwrap();
    forger.connection.send(&forged).await.unwrap();
    // The messages of one sender are handled in order.
    forger.call(MANAGER, "ListNodes", &()).await.unwrap();
    client.call(&path, "Subscribe", &("n1", "a*")).await.unwrap();
}
