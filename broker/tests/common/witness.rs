//! Bystanders of what other clients do.

use super::audit::audit;
use super::broker::Broker;
use super::child::Process;
use super::role::{Consume, Produce};
use ringmain::QueueSettings;

/// A producer and a consumer who must not notice any of it.
pub struct Witness {
    producer: Process,
    consumer: Process,
}

impl Witness {
    pub fn of(broker: &Broker) -> Witness {
        broker.create("witness", &QueueSettings::default());
        let witness = Witness {
            producer: broker.produce(Produce {
                // Few at a time: it is not a load.
                flush_every: 5,
                ..Produce::new("witness", 1)
            }),
            consumer: broker.consume(Consume::new("witness")),
        };
        witness.undisturbed();
        witness
    }

    #[track_caller]
    pub fn undisturbed(&self) {
        self.producer.wait_for_more(10);
        self.consumer.wait_for_more(10);
    }

    #[track_caller]
    pub fn finish(mut self, broker: &Broker) {
        self.undisturbed();
        self.producer.finish();
        broker.wait_drained("witness");
        self.consumer.finish();
        let report = audit(&[&self.producer], &[&self.consumer]);
        assert_eq!((report.delivered, report.repeated), (report.accepted, 0));
    }
}
