//! Failures and power cuts, as the simulation makes them.

use super::engines::*;
use ringmain_broker::store::Store;
use ringmain_broker::store::model::{Fault, ModelStore};

/// Round 1 synced, then rounds 2 and 3 with five and four messages.
fn three_rounds() -> ModelStore {
    let store = ModelStore::new();
    commit(&store, vec![put(1, "a")]);
    store.sync().unwrap();
    commit(&store, vec![append(1, 0..5)]);
    commit(&store, vec![append(1, 5..9)]);
    store
}

#[test]
fn failed_commit_was_applied_or_not_as_told() {
    for (fault, len) in [(Fault::Lost, 9), (Fault::Applied, 11)] {
        let store = three_rounds();
        store.fail_next_commit(fault);
        assert!(try_commit(&store, vec![append(1, 9..11)]).is_err());
        assert!(store.sync().is_err() && store.read(1, 0, 1).is_err());
        assert_eq!(read_all(&store.reopen(), 1).len(), len);
    }
}

#[test]
fn failed_sync_was_applied_or_not_as_told() {
    for (fault, len) in [(Fault::Lost, 0), (Fault::Applied, 9)] {
        let store = three_rounds();
        store.fail_next_sync(fault);
        assert!(store.sync().is_err() && try_commit(&store, Vec::new()).is_err());
        assert_eq!(read_all(&store.power_cut(0), 1).len(), len);
        assert_eq!(read_all(&store.reopen(), 1).len(), 9);
    }
}

// I10
#[test]
fn power_cut_keeps_what_was_synced_and_a_prefix_of_the_rest() {
    let store = three_rounds();
    assert_eq!(store.unsynced_batches(), 2);
    for (keep, round, len) in [(0, 1, 0), (1, 2, 5), (2, 3, 9), (3, 3, 9)] {
        let cut = store.power_cut(keep);
        assert_eq!(
            (cut.committed_round(), read_all(&cut, 1).len()),
            (round, len)
        );
        // What is found after a power cut lies on the disk.
        assert_eq!(cut.power_cut(0).committed_round(), round);
    }
}

#[test]
fn room_is_what_was_set() {
    let store = ModelStore::new();
    store.set_room(17);
    assert_eq!(store.room().unwrap(), 17);
    assert_eq!(store.reopen().room().unwrap(), 17);
}
