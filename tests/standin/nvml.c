/*
 * A stand-in for libnvidia-ml.so.1 that the real binding loads. It answers from a text table, the
 * file that the environment variable GPUTOPO_TEST_NVML names; table() in __init__.py writes one
 * from any recording.
 *
 * One line an answer: KEY, a tab, VALUE. The key is the call as recordings name it, with its
 * arguments, a MIG device being GPU/INSTANCE: "nvmlDeviceGetP2PStatus 0 1 2",
 * "nvmlDeviceGetName 1/0". The value holds words parted by spaces: numbers, CPU lists, hexadecimal
 * bytes, or text with %XX for what is not plain ASCII; or it is "!N", NVML error N. What has no line
 * is NOT_SUPPORTED. Lines that begin with @ make trouble:
 *
 *   @CALL or @CALL ARGUMENTS   hang | crash | sleep MILLISECONDS
 *   @lost GPU                  N: every call for that GPU but that for its handle is error N
 *   @block-term                1: ignore SIGTERM from the start on
 *   @chatter                   1: print to both standard streams at the start
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9,
	ARGUMENT_VERSION_MISMATCH = 25,
	UNKNOWN = 999,
};

enum { GPUS = 256, INSTANCES = 64, MAX_NUMBERS = 4096 };

typedef unsigned long long number;
typedef struct device { int gpu, instance; } *device;

struct line { char *key, *value; };

static struct line *lines;
static size_t count;
static int started;
static struct device gpus[GPUS], instances[GPUS][INSTANCES];

static int load(void)
{
	const char *path = getenv("GPUTOPO_TEST_NVML");
	FILE *file = path ? fopen(path, "r") : NULL;
	char *text = NULL;
	size_t room = 0;

	if (!file)
		return DRIVER_NOT_LOADED;
	while (getline(&text, &room, file) > 0) {
		char *tab = strchr(text, '\t');

		if (!tab)
			continue;
		*tab = 0;
		tab[1 + strcspn(tab + 1, "\n")] = 0;
		lines = realloc(lines, (count + 1) * sizeof *lines);
		lines[count++] = (struct line){ strdup(text), strdup(tab + 1) };
	}
	free(text);
	fclose(file);
	for (int i = 0; i < GPUS; i++) {
		gpus[i] = (struct device){ i, -1 };
		for (int j = 0; j < INSTANCES; j++)
			instances[i][j] = (struct device){ i, j };
	}
	return SUCCESS;
}

static const char *look(const char *key)
{
	for (size_t i = 0; i < count; i++)
		if (!strcmp(lines[i].key, key))
			return lines[i].value;
	return NULL;
}

static void make_trouble(const char *call, const char *key)
{
	char name[520];
	const char *what;

	snprintf(name, sizeof name, "@%s", key);
	what = look(name);
	if (!what) {
		snprintf(name, sizeof name, "@%s", call);
		what = look(name);
	}
	if (!what)
		return;
	if (!strcmp(what, "hang"))
		for (;;)
			pause();
	if (!strcmp(what, "crash"))
		raise(SIGSEGV);
	if (!strncmp(what, "sleep ", 6)) {
		long ms = atol(what + 6);
		struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

		nanosleep(&t, NULL);
	}
}

/* The value that the table has for a call; `format` prints the arguments after the device. */
static int ask(const char **value, const char *call, device d, const char *format, ...)
{
	char key[512];
	int used = snprintf(key, sizeof key, "%s", call);
	va_list list;

	if (!started)
		return UNINITIALIZED;
	if (d) {
		char lost[32];
		const char *code;

		used += snprintf(key + used, sizeof key - used, " %d", d->gpu);
		if (d->instance >= 0)
			used += snprintf(key + used, sizeof key - used, "/%d", d->instance);
		snprintf(lost, sizeof lost, "@lost %d", d->gpu);
		if ((code = look(lost)))
			return atoi(code);
	}
	va_start(list, format);
	if (*format) {
		key[used++] = ' ';
		vsnprintf(key + used, sizeof key - used, format, list);
	}
	va_end(list);
	make_trouble(call, key);
	*value = look(key);
	if (!*value)
		return NOT_SUPPORTED;
	return **value == '!' ? atoi(*value + 1) : SUCCESS;
}

static int word(const char **at, char *out, size_t room)
{
	size_t size = strcspn(*at, " ");

	if (!**at || size >= room)
		return 0;
	memcpy(out, *at, size);
	out[size] = 0;
	*at += size + ((*at)[size] == ' ');
	return 1;
}

static int numbers(const char **at, number *out, int most)
{
	char text[32];
	int n = 0;

	while (n < most && word(at, text, sizeof text))
		out[n++] = *text == '-' ? (number)strtoll(text, NULL, 10) : strtoull(text, NULL, 10);
	return n;
}

/* Text with its %XX decoded; the terminating NUL must fit too. */
static int text(char *out, size_t room, const char *value)
{
	size_t n = 0;

	for (; *value; value++) {
		unsigned byte = (unsigned char)*value;

		if (byte == '%' && sscanf(value + 1, "%2x", &byte) == 1)
			value += 2;
		if (n + 1 >= room)
			return INSUFFICIENT_SIZE;
		out[n++] = (char)byte;
	}
	out[n] = 0;
	return SUCCESS;
}

static void hexadecimal(uint8_t *out, int size, const char *value)
{
	for (int i = 0; i < size; i++) {
		unsigned byte = 0;

		sscanf(value + 2 * i, "%2x", &byte);
		out[i] = (uint8_t)byte;
	}
}

/* Shapes that many calls share. */

static int one(const char *call, device d, unsigned *out)
{
	const char *value;
	number n = 0;
	int code = ask(&value, call, d, "");

	if (code)
		return code;
	numbers(&value, &n, 1);
	*out = (unsigned)n;
	return SUCCESS;
}

static int several(const char *call, device d, unsigned **out, int size)
{
	const char *value;
	number n[8];
	int code = ask(&value, call, d, "");

	if (code)
		return code;
	if (numbers(&value, n, size) != size)
		return UNKNOWN;
	for (int i = 0; i < size; i++)
		*out[i] = (unsigned)n[i];
	return SUCCESS;
}

#define NUMBER(call) \
	API int call(device d, unsigned *out) { return d ? one(#call, d, out) : INVALID_ARGUMENT; }
#define TEXT(call) \
	API int call(device d, char *out, unsigned room) \
	{ \
		const char *value; \
		int code = d ? ask(&value, #call, d, "") : INVALID_ARGUMENT; \
		return code ? code : text(out, room, value); \
	}
#define TWO(call) \
	API int call(device d, unsigned *a, unsigned *b) \
	{ return several(#call, d, (unsigned *[]){ a, b }, 2); }
#define INDEXED(call) \
	API int call(device d, unsigned index, unsigned *out) \
	{ \
		const char *value; \
		number n = 0; \
		int code = ask(&value, #call, d, "%u", index); \
		if (!code) { \
			numbers(&value, &n, 1); \
			*out = (unsigned)n; \
		} \
		return code; \
	}
#define SYSTEM_TEXT(call) \
	API int call(char *out, unsigned room) \
	{ \
		const char *value; \
		int code = ask(&value, #call, NULL, ""); \
		return code ? code : text(out, room, value); \
	}

API int nvmlInitWithFlags(unsigned flags)
{
	const char *value;
	int code = started ? SUCCESS : load();

	(void)flags;
	if (code)
		return code;
	if (look("@block-term")) {
		sigset_t set;

		sigemptyset(&set);
		sigaddset(&set, SIGTERM);
		sigprocmask(SIG_BLOCK, &set, NULL);
	}
	if (look("@chatter")) {
		puts("NVRM: a driver library that talks to whoever listens");
		fputs("NVRM: and complains too\n", stderr);
		fflush(stdout);
	}
	started = 1;
	code = ask(&value, "nvmlInit", NULL, "");
	if (code == NOT_SUPPORTED)
		code = SUCCESS;
	started = code == SUCCESS;
	return code;
}

API int nvmlShutdown(void)
{
	started = 0;
	return SUCCESS;
}

SYSTEM_TEXT(nvmlSystemGetDriverVersion)
SYSTEM_TEXT(nvmlSystemGetNVMLVersion)

API int nvmlSystemGetCudaDriverVersion_v2(unsigned *out)
{
	return one("nvmlSystemGetCudaDriverVersion_v2", NULL, out);
}

API int nvmlDeviceGetCount_v2(unsigned *out)
{
	return one("nvmlDeviceGetCount", NULL, out);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetHandleByIndex", NULL, "%u", index);

	if (!code)
		*out = &gpus[index % GPUS];
	return code == NOT_SUPPORTED ? INVALID_ARGUMENT : code;
}

TEXT(nvmlDeviceGetName)
TEXT(nvmlDeviceGetUUID)
TEXT(nvmlDeviceGetSerial)
TEXT(nvmlDeviceGetBoardPartNumber)
TEXT(nvmlDeviceGetVbiosVersion)
NUMBER(nvmlDeviceGetMinorNumber)
NUMBER(nvmlDeviceGetModuleId)
NUMBER(nvmlDeviceGetArchitecture)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth)
NUMBER(nvmlDeviceGetPcieReplayCounter)
NUMBER(nvmlDeviceGetNumaNodeId)
NUMBER(nvmlDeviceGetC2cModeInfoV)
NUMBER(nvmlDeviceGetPersistenceMode)
NUMBER(nvmlDeviceGetPerformanceState)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus)
NUMBER(nvmlDeviceGetEnforcedPowerLimit)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit)
NUMBER(nvmlDeviceGetMaxMigDeviceCount)
NUMBER(nvmlDeviceGetGpuInstanceId)
NUMBER(nvmlDeviceGetComputeInstanceId)
TWO(nvmlDeviceGetMigMode)
TWO(nvmlDeviceGetCudaComputeCapability)
TWO(nvmlDeviceGetEccMode)
INDEXED(nvmlDeviceGetNvLinkState)
INDEXED(nvmlDeviceGetNvLinkVersion)
INDEXED(nvmlDeviceGetNvLinkRemoteDeviceType)
INDEXED(nvmlDeviceGetApplicationsClock)
INDEXED(nvmlDeviceGetDefaultApplicationsClock)

API int nvmlDeviceGetRemappedRows(device d, unsigned *a, unsigned *b, unsigned *c, unsigned *e)
{
	return several("nvmlDeviceGetRemappedRows", d, (unsigned *[]){ a, b, c, e }, 4);
}

static int clock_reasons(device d, number *out)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetCurrentClocksEventReasons", d, "");

	if (!code)
		numbers(&value, out, 1);
	return code;
}

API int nvmlDeviceGetCurrentClocksEventReasons(device d, number *out)
{
	return clock_reasons(d, out);
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(device d, number *out)
{
	return clock_reasons(d, out);
}

struct versioned { unsigned version, value; };

API int nvmlDeviceGetAddressingMode(device d, struct versioned *mode)
{
	if (mode->version != (sizeof *mode | 1u << 24))
		return ARGUMENT_VERSION_MISMATCH;
	return one("nvmlDeviceGetAddressingMode", d, &mode->value);
}

/* Memory: total, free, used. Both structures of this shape have three 64-bit fields. */
static int memory(const char *call, device d, number *out)
{
	const char *value;
	int code = ask(&value, call, d, "");

	if (code)
		return code;
	return numbers(&value, out, 3) == 3 ? SUCCESS : UNKNOWN;
}

API int nvmlDeviceGetMemoryInfo(device d, number *out)
{
	return memory("nvmlDeviceGetMemoryInfo", d, out);
}

API int nvmlDeviceGetBAR1MemoryInfo(device d, number *out)
{
	return memory("nvmlDeviceGetBAR1MemoryInfo", d, out);
}

struct pci { char legacy[16]; unsigned fields[5]; char bus_id[32]; };

/* Value: the short bus id, domain, bus, device, device id, subsystem id, the long bus id. */
static int pci(struct pci *out, const char *value)
{
	char escaped[128];
	number n[5];

	if (!word(&value, escaped, sizeof escaped) || text(out->legacy, sizeof out->legacy, escaped))
		return UNKNOWN;
	if (numbers(&value, n, 5) != 5)
		return UNKNOWN;
	for (int i = 0; i < 5; i++)
		out->fields[i] = (unsigned)n[i];
	return text(out->bus_id, sizeof out->bus_id, value);
}

API int nvmlDeviceGetPciInfo_v3(device d, struct pci *out)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetPciInfo", d, "");

	return code ? code : pci(out, value);
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(device d, unsigned link, struct pci *out)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetNvLinkRemotePciInfo", d, "%u", link);

	return code ? code : pci(out, value);
}

/* Masks come as lists: "0-23,48-71". */
static int mask(uint64_t *out, unsigned words, const char *value)
{
	memset(out, 0, words * sizeof *out);
	while (*value) {
		char *end;
		unsigned long first = strtoul(value, &end, 10), last = first;

		if (*end == '-')
			last = strtoul(end + 1, &end, 10);
		if (last / 64 >= words)
			return INSUFFICIENT_SIZE;
		for (; first <= last; first++)
			out[first / 64] |= 1ull << first % 64;
		value = end + (*end == ',');
	}
	return SUCCESS;
}

API int nvmlDeviceGetCpuAffinity(device d, unsigned words, uint64_t *out)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetCpuAffinity", d, "");

	return code ? code : mask(out, words, value);
}

API int nvmlDeviceGetCpuAffinityWithinScope(device d, unsigned words, uint64_t *out, unsigned scope)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetCpuAffinityWithinScope", d, "%u", scope);

	return code ? code : mask(out, words, value);
}

API int nvmlDeviceGetMemoryAffinity(device d, unsigned words, uint64_t *out, unsigned scope)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetMemoryAffinity", d, "%u", scope);

	return code ? code : mask(out, words, value);
}

struct field {
	uint32_t id, scope;
	int64_t timestamp, latency;
	unsigned type;
	int code;
	union { double real; number whole; } value;
};

enum { DOUBLE = 0 };

/* One line a field: its return code, its type (nvmlValueType_t), its value. */
API int nvmlDeviceGetFieldValues(device d, int size, struct field *fields)
{
	for (int i = 0; i < size; i++) {
		struct field *field = &fields[i];
		const char *value;
		char real[64];
		number n[2] = { NOT_SUPPORTED, 0 };
		int code = ask(&value, "nvmlDeviceGetFieldValues", d, "%u %u", field->id, field->scope);

		if (code && code != NOT_SUPPORTED)
			return code;
		field->value.whole = 0;
		if (!code && numbers(&value, n, 2) == 2) {
			if (n[1] == DOUBLE && word(&value, real, sizeof real))
				field->value.real = strtod(real, NULL);
			else
				numbers(&value, &field->value.whole, 1);
		}
		field->timestamp = field->latency = 0;
		field->type = (unsigned)n[1];
		field->code = (int)n[0];
	}
	return SUCCESS;
}

/* Value: cluster UUID, status, clique, state, health mask, health summary. A driver knows the
 * versions of the structure that its value has the fields for: 6 make version 3, 5 version 2. */
static int fabric(device d, uint8_t *uuid, unsigned *fields, int *known)
{
	const char *value;
	char hex[40];
	number n[5];
	int code = ask(&value, "nvmlDeviceGetGpuFabricInfoV", d, "");

	if (code)
		return code;
	if (!word(&value, hex, sizeof hex))
		return UNKNOWN;
	hexadecimal(uuid, 16, hex);
	*known = numbers(&value, n, 5);
	for (int i = 0; i < *known; i++)
		fields[i] = (unsigned)n[i];
	return SUCCESS;
}

struct fabric_v { unsigned version; uint8_t uuid[16]; unsigned fields[4]; uint8_t summary; };

API int nvmlDeviceGetGpuFabricInfoV(device d, struct fabric_v *out)
{
	unsigned fields[5];
	int known, code = fabric(d, out->uuid, fields, &known);
	unsigned wanted = out->version >> 24;

	if (code)
		return code;
	if (out->version != (wanted == 3 ? 0x3000028u : 0x2000024u) || (int)wanted > known - 2)
		return ARGUMENT_VERSION_MISMATCH;
	memcpy(out->fields, fields, sizeof out->fields);
	if (wanted == 3)
		out->summary = (uint8_t)fields[4];
	return SUCCESS;
}

struct fabric_old { uint8_t uuid[16]; unsigned fields[3]; };

API int nvmlDeviceGetGpuFabricInfo(device d, struct fabric_old *out)
{
	unsigned fields[5];
	int known, code = fabric(d, out->uuid, fields, &known);

	if (!code)
		memcpy(out->fields, fields, sizeof out->fields);
	return code;
}

struct platform { unsigned version; uint8_t guid[16]; char chassis[16]; uint8_t fields[5]; };

/* Value: the GUID, slot, tray, host, peer type, module, the chassis serial number. */
API int nvmlDeviceGetPlatformInfo(device d, struct platform *out)
{
	const char *value;
	char hex[40], serial[17];
	number n[5];
	int code = ask(&value, "nvmlDeviceGetPlatformInfo", d, "");

	if (code)
		return code;
	if (out->version != (sizeof *out | 2u << 24))
		return ARGUMENT_VERSION_MISMATCH;
	if (!word(&value, hex, sizeof hex) || numbers(&value, n, 5) != 5)
		return UNKNOWN;
	hexadecimal(out->guid, 16, hex);
	for (int i = 0; i < 5; i++)
		out->fields[i] = (uint8_t)n[i];
	if (text(serial, sizeof serial, value))
		return UNKNOWN;
	memcpy(out->chassis, serial, sizeof out->chassis); /* all 16 may be used: no NUL then */
	return SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned index, device *out)
{
	const char *value;
	int code = ask(&value, "nvmlDeviceGetMigDeviceHandleByIndex", d, "%u", index);

	if (!code)
		*out = &instances[d->gpu][index % INSTANCES];
	return code;
}

API int nvmlDeviceGetTopologyCommonAncestor(device a, device b, unsigned *out)
{
	const char *value;
	number n = 0;
	int code = ask(&value, "nvmlDeviceGetTopologyCommonAncestor", a, "%d", b->gpu);

	if (!code) {
		numbers(&value, &n, 1);
		*out = (unsigned)n;
	}
	return code;
}

API int nvmlDeviceGetP2PStatus(device a, device b, unsigned capability, unsigned *out)
{
	const char *value;
	number n = 0;
	int code = ask(&value, "nvmlDeviceGetP2PStatus", a, "%d %u", b->gpu, capability);

	if (!code) {
		numbers(&value, &n, 1);
		*out = (unsigned)n;
	}
	return code;
}

struct process { unsigned pid; number memory; unsigned gpu_instance, compute_instance; };

/* Four numbers a process. As NVML does, says how many there are when they do not fit. */
static int processes(const char *call, device d, unsigned *size, struct process *out)
{
	static number n[MAX_NUMBERS];
	const char *value;
	unsigned found;
	int code = ask(&value, call, d, "");

	if (code)
		return code;
	found = (unsigned)numbers(&value, n, MAX_NUMBERS) / 4;
	code = found > *size ? INSUFFICIENT_SIZE : SUCCESS;
	for (unsigned i = 0; !code && i < found; i++)
		out[i] = (struct process){
			(unsigned)n[4 * i], n[4 * i + 1], (unsigned)n[4 * i + 2], (unsigned)n[4 * i + 3],
		};
	*size = found;
	return code;
}

#define PROCESSES(call) \
	API int call##_v3(device d, unsigned *size, struct process *out) \
	{ return processes(#call, d, size, out); } \
	API int call##_v2(device d, unsigned *size, struct process *out) \
	{ return processes(#call, d, size, out); }

PROCESSES(nvmlDeviceGetComputeRunningProcesses)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
