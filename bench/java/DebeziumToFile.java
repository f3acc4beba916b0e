import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;
import java.util.Properties;

/**
 * Debezium's embedded engine as a log of its own: each batch's JSON, a line a record, goes into a file, is fdatasynced, and
 * only then counts as processed.
 *
 * <p>Arguments: a file of properties for the engine, the file to write, the rows to wait for. On stdout: after
 * each batch how many rows are on disk. It ends with the batch that brings the last one.
 */
public final class DebeziumToFile {
    private final FileChannel file;
    private final long wanted;
    private final StringBuilder lines = new StringBuilder();
    private long rows;

    private DebeziumToFile(FileChannel file, long wanted) {
        this.file = file;
        this.wanted = wanted;
    }

    private void take(
            List<ChangeEvent<String, String>> batch, DebeziumEngine.RecordCommitter<ChangeEvent<String, String>> committer)
            throws InterruptedException {
        try {
            lines.setLength(0);
            for (ChangeEvent<String, String> event : batch) {
                lines.append(event.value()).append('\n');
                committer.markProcessed(event);
            }
            ByteBuffer bytes = ByteBuffer.wrap(lines.toString().getBytes(StandardCharsets.UTF_8));
            while (bytes.hasRemaining()) {
                file.write(bytes);
            }
            file.force(false);
            committer.markBatchFinished();
        } catch (java.io.IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
        rows += batch.size();
        System.out.println(rows);
        System.out.flush();
        if (rows >= wanted) {
            Runtime.getRuntime().halt(0); // a tidy end takes seconds, and has no use: the slot belongs to the caller
        }
    }

    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        try (var reader = Files.newBufferedReader(Path.of(arguments[0]))) {
            properties.load(reader);
        }
        try (FileChannel file =
                FileChannel.open(Path.of(arguments[1]), StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
            DebeziumToFile log = new DebeziumToFile(file, Long.parseLong(arguments[2]));
            try (DebeziumEngine<ChangeEvent<String, String>> engine =
                    DebeziumEngine.create(Json.class)
                            .using(properties)
                            .using((success, message, error) -> {
                                System.err.println(message);
                                if (error != null) {
                                    error.printStackTrace();
                                }
                                Runtime.getRuntime().halt(1);
                            })
                            .notifying(log::take)
                            .build()) {
                engine.run();
            }
        }
    }
}
