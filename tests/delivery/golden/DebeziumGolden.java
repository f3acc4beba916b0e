import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.Header;
import io.debezium.engine.format.Json;
import io.debezium.engine.format.KeyValueHeaderChangeEventFormat;
import java.io.FileInputStream;
import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/** Reads a slot with Debezium's engine until a logical message with the prefix "golden-end", one line a Kafka record. */
public class DebeziumGolden {
    public static void main(String[] args) throws Exception {
        for (String name : args) {
            Properties properties = new Properties();
            try (FileInputStream in = new FileInputStream(name)) {
                properties.load(in);
            }
            run(properties, Path.of(properties.getProperty("golden.output")));
        }
    }

    static void run(Properties properties, Path output) throws Exception {
        CountDownLatch done = new CountDownLatch(1);
        String end = "\"golden-end\"";
        AtomicReference<String> failure = new AtomicReference<>();
        try (PrintWriter out = new PrintWriter(Files.newBufferedWriter(output, StandardCharsets.UTF_8))) {
            DebeziumEngine<ChangeEvent<String, String>> engine = DebeziumEngine
                .create(KeyValueHeaderChangeEventFormat.of(Json.class, Json.class, Json.class))
                .using(properties)
                .using((success, message, error) -> {
                    if (!success) {
                        failure.set(message + ": " + error);
                        if (error != null) error.printStackTrace();
                    }
                    done.countDown();
                })
                .notifying((records, committer) -> {
                    for (ChangeEvent<String, String> record : records) {
                        StringBuilder line = new StringBuilder("{\"topic\":\"" + record.destination() + "\",\"key\":");
                        line.append(record.key()).append(",\"value\":").append(record.value()).append(",\"headers\":{");
                        boolean first = true;
                        for (Header<?> header : record.headers()) {
                            line.append(first ? "" : ",").append("\"" + header.getKey() + "\":" + header.getValue());
                            first = false;
                        }
                        boolean isEnd = record.value() != null && record.value().contains(end);
                        if (!record.destination().endsWith(".message") || !isEnd) {
                            out.write(line.append("}}\n").toString());
                        }
                        committer.markProcessed(record);
                        if (isEnd) {
                            done.countDown();
                        }
                    }
                    committer.markBatchFinished();
                })
                .build();
            ExecutorService executor = Executors.newSingleThreadExecutor();
            executor.execute(engine);
            boolean ended = done.await(90, TimeUnit.SECONDS);
            engine.close();
            executor.shutdownNow();
            executor.awaitTermination(20, TimeUnit.SECONDS);
            if (!ended || failure.get() != null) {
                System.err.println(output + ": " + (failure.get() == null ? "timed out" : failure.get()));
            }
        }
    }
}
