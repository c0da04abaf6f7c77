//! The snapshot of the status board under loom: a reader sees all of one writing,
//! in every order that the memory model allows.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

use loom::sync::Arc;
use loom::thread;
use ringmain_ring::{AtomicU64, snapshot};

#[test]
fn a_reader_sees_all_of_one_writing() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let words = (0..snapshot::words_for(2)).map(|_| AtomicU64::new(0));
        let words: Arc<Vec<AtomicU64>> = Arc::new(words.collect());
        assert!(snapshot::write(&words, &[1, 1]));
        let shared = Arc::clone(&words);
        let writer = thread::spawn(move || {
            assert!(snapshot::write(&shared, &[2, 2]));
            assert!(snapshot::write(&shared, &[3, 3]));
        });
        let seen = snapshot::read(&words).unwrap();
        assert!(
            [[1, 1], [2, 2], [3, 3]].iter().any(|all| seen == all),
            "{seen:?}"
        );
        writer.join().unwrap();
        assert_eq!(snapshot::read(&words).unwrap(), [3, 3]);
    });
}
