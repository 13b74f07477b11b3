// The dashboard. Text from volunteers is inserted as text, never as markup.
import { Plot, compact } from "/plot.js";

const REFRESH_MS = 5000;
const RECONNECT_MS = 8000;
const EVENTS_SHOWN = 100;
const TOKEN_KEY = "swarmtrain-organiser";

const $ = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

async function ask(path, token) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { headers });
  const content = await response.json();
  if (!response.ok) throw Object.assign(new Error(content.error ?? response.statusText), { status: response.status });
  return content;
}

// ---------------------------------------------------------------- the run

const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

const share = (value) => (value === null ? "–" : `${number(100 * value, 0)} %`);
const time = (seconds) => (seconds >= 1 ? `${seconds.toPrecision(3)} s` : `${(1000 * seconds).toPrecision(3)} ms`);

function showRun(run) {
  document.title = `${run.health.state}: ${run.name}`;
  $("name").textContent = run.name;
  showHealth(run.health);
  const progress = $("progress");
  progress.max = Math.max(1, run.steps);
  progress.value = run.version;
  $("progress-text").textContent = `step ${run.version} of ${run.steps}, ${run.phase}`;
  const cells = run.cells_total ? Math.round((100 * run.cells_done) / run.cells_total) : 0;
  const tiles = [
    ["Loss", number(run.loss, 4)],
    ["Tokens/s", compact(run.tokens_per_second)],
    ["This step", `${cells} %`],
    ["Peers now", String(run.peers)],
    ["Contributors", String(run.contributors)],
    ["Bubble", share(run.bubble_share)],
    ["Tokens so far", compact(run.tokens)],
    ["Checkpoint", run.checkpoint_version === null ? "none yet" : `step ${run.checkpoint_version}`],
  ];
  const rejected = Object.entries(run.rejected).filter(([, count]) => count > 0);
  $("rejected").textContent = rejected.length
    ? `Rejected since the coordinator started: ${rejected.map(([reason, count]) => `${count} × ${reason}`).join(", ")}.` : "";
  const evaluation = run.evaluation;
  if (run.heldout_loss !== null) tiles.push(["Held-out loss", number(run.heldout_loss, 4)]);
  else if (evaluation) tiles.push(["Held-out loss", `${number(evaluation.heldout_loss, 4)} at step ${evaluation.version}`]);
  $("sample-part").hidden = !evaluation || !evaluation.sample;
  if (evaluation) {
    $("sample-step").textContent = `after step ${evaluation.version}`;
    $("sample").textContent = evaluation.sample;
  }
  $("tiles").replaceChildren(...tiles.map(([title, value]) => {
    const tile = element("div");
    tile.append(element("dt", title), element("dd", value));
    return tile;
  }));
  $("as-of").textContent = `As of ${clock(run.time)}. swarmtrain ${run.software}.`;
}

function showHealth(health) {
  $("health").dataset.state = health.state;
  // A screen reader repeats the line at every change, so it is set only when it differs.
  if ($("health-state").textContent !== health.state) $("health-state").textContent = health.state;
  if ($("sentence").textContent !== health.sentence) $("sentence").textContent = health.sentence;
}

const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
const day = (seconds) => new Date(1000 * seconds).toLocaleString();

const plots = {
  loss: new Plot($("loss"), "Loss", "nats", (point) => ({
    x: point.last_step, label: stepsOf(point), value: point.loss, low: point.lowest_loss, high: point.highest_loss,
  })),
  rate: new Plot($("rate"), "Throughput", "tokens/s", (point) => ({
    x: point.last_step, label: stepsOf(point), value: point.tokens_per_second,
    low: point.tokens_per_second, high: point.tokens_per_second,
  }), true),
};

function stepsOf(point) {
  return point.first_step === point.last_step ? `step ${point.first_step}` : `steps ${point.first_step} to ${point.last_step}`;
}

function showCurve(curve) {
  plots.loss.show(curve.points);
  plots.rate.show(curve.points);
}

// ---------------------------------------------------------------- pipeline

let stages = null;
let peers = [];
const CHIPS = 24;

const nameOf = (peer) => peer.name ?? `…${peer.id_end}`;

function showPipeline() {
  if (!stages) return;
  $("stages").replaceChildren(...stages.stages.map(stageRow));
  const waiting = peers.filter((peer) => peer.stage === null);
  $("unplaced").textContent = waiting.length ? `Without a stage yet: ${waiting.map(nameOf).join(", ")}` : "";
  const moves = stages.rebalancing.slice(-3).map((text) => element("li", text));
  if (stages.no_move_reason) moves.push(element("li", `no peer moves now: ${stages.no_move_reason}`));
  $("moves").replaceChildren(...moves);
}

function stageRow(stage) {
  const row = element("li", undefined, stage.ready ? "" : "empty");
  const line = element("div", undefined, "stage-line");
  const layers = stage.end_layer > stage.first_layer ? `layers ${stage.first_layer} to ${stage.end_layer - 1}` : "no layer";
  const held = stage.ready === 1 ? "1 peer" : `${stage.ready} peers`;
  const coming = stage.syncing ? `, ${stage.syncing} downloading` : "";
  line.append(element("strong", `Stage ${stage.stage}`),
    element("span", `${held}${coming} · ${number(stage.microbatches_per_second, 2)} microbatches/s · ${layers} · ${number(100 * stage.work_share, 0)} % of the work`, "figures"));
  const times = stage.p50_seconds === null ? "" : `a microbatch takes ${time(stage.p50_seconds)}, one in twenty more than ${time(stage.p95_seconds)}`;
  const idle = stage.idle_share === null ? "" : `idle for ${share(stage.idle_share)} of the time`;
  const bar = element("div", undefined, "bar");
  bar.setAttribute("aria-hidden", "true");
  const fill = element("span");
  fill.style.width = `${Math.round(100 * stage.relative_rate)}%`;
  bar.append(fill);
  row.append(line, bar);
  if (times || idle) row.append(element("p", [times, idle].filter(Boolean).join(" · "), "quiet times"));
  row.append(chips(peers.filter((peer) => peer.stage === stage.stage)));
  return row;
}

function chips(here) {
  const list = element("ul", undefined, "chips");
  for (const peer of here.slice(0, CHIPS)) {
    const state = peer.leaving ? "leaving" : peer.phase;
    const rate = state === "ready" ? number(peer.microbatches_per_second, 2) + "/s" : state;
    list.append(element("li", `${nameOf(peer)} ${rate}`, state));
  }
  if (here.length > CHIPS) list.append(element("li", `and ${here.length - CHIPS} more`));
  return list;
}

// ---------------------------------------------------------------- leaderboard and events

// Fill a table's body with a row of [value, class name] for each one; without any, with `none`.
function fill(id, found, valuesOf, ...none) {
  const body = $(id);
  body.replaceChildren();
  const nothing = none.length ? [none.map((text) => [text])] : [];
  for (const values of found.length ? found.map(valuesOf) : nothing) {
    const row = body.insertRow();
    for (const [value, className] of values) {
      const cell = row.insertCell();
      cell.append(value);
      if (className) cell.className = className;
    }
  }
}

const credits = (one) => [[compact(one.credit), "number"], [compact(one.credit_per_day), "number"]];

function showBoard(found) {
  fill("board", found.contributions, (one) => {
    const owner = element("span", one.name ?? "", "owner");
    const devices = one.devices > 1 ? `, ${one.devices} devices` : "";
    owner.append(element("small", `${one.name ? " " : ""}…${one.id_end}${devices}`));
    return [[one.rank], [owner, "owner"], [one.stages.join(", ")], ...credits(one)];
  }, "", "no step has been applied yet");
  if (found.total > found.contributions.length) {
    $("board-note").textContent = `The first ${found.contributions.length} of ${found.total}. One credit is one token through the whole model.`;
  }
}

function showTeams(found) {
  $("teams-part").hidden = !found.total;
  fill("teams", found.teams, (one) => [[one.rank], [one.team], [one.members, "number"], ...credits(one)]);
}

function showTrust(trust) {
  $("audits").textContent = `${trust.passed} audits passed and ${trust.lost} lost, ${trust.under_way} under way; `
    + `${trust.established} owners established, ${trust.on_probation} on probation; `
    + `${number(100 * trust.audit_share, 1)} % of an established owner's microbatches are audited.`;
  fill("owners", trust.owners, (one) => {
    const standing = one.established ? "established" : `on probation, ${trust.probation_cells - one.passed} more to pass`;
    return [[one.name ?? `…${one.id_end}`], [one.passed, "number"], [one.lost, "number"], [one.made, "number"], [standing]];
  }, "no audit has ended yet", "", "", "", "");
  fill("verdicts", [...trust.verdicts].reverse(), (one) => [[one.step, "number"], [`…${one.id_end}`], [one.reason]],
    "", "no audit was lost", "");
}

let newest = 0;

function addEvents(rows) {
  const list = $("events");
  for (const row of rows) {
    if (row.id <= newest) continue;
    newest = row.id;
    const item = element("li");
    const time = element("time", clock(row.written_at));
    time.dateTime = new Date(1000 * row.written_at).toISOString();
    item.append(time, element("span", row.text));
    list.prepend(item);
  }
  while (list.children.length > EVENTS_SHOWN) list.lastChild.remove();
}

// ---------------------------------------------------------------- the organiser's part

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(TOKEN_KEY, given);
    // Removed from the address bar, where it could be read or shared with the link.
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(TOKEN_KEY);
}

let token = takeToken();

async function refreshOrganiser() {
  if (!token) return;
  const problem = $("organiser-problem");
  $("organiser").hidden = false;
  try {
    const [full, admission, invites] = await Promise.all([
      ask("/api/v1/organiser/peers?limit=500", token), ask("/api/v1/organiser/bans", token),
      ask("/api/v1/organiser/tokens", token),
    ]);
    showFullPeers(full);
    showAdmission(admission, invites);
    problem.hidden = true;
  } catch (error) {
    problem.hidden = false;
    problem.textContent = error.message;
    if (error.status === 401) forget();
  }
}

function forget() {
  token = null;
  sessionStorage.removeItem(TOKEN_KEY);
  for (const id of ["full-peers", "bans", "tokens"]) $(id).replaceChildren();
}

function showFullPeers(full) {
  const names = new Map(full.peers.map((peer) => [peer.peer, peer.name]));
  names.set(full.coordinator, "the coordinator");
  const short = (id) => names.get(id) ?? `…${id.slice(-8)}`;
  fill("full-peers", full.peers, (peer) => {
    const paths = peer.paths.map((path) => {
      const over = path.relay ? ` via ${short(path.relay)}` : "";
      return `${short(path.remote)} ${path.kind}${over}, ${(1000 * path.rtt_seconds).toPrecision(3)} ms`;
    });
    const reached = peer.reachability.replace("_", " ") + (peer.offers_relay ? ", relays" : "");
    return [[peer.peer, "id"], [peer.name ?? ""], [peer.stage === null ? "–" : peer.stage],
      [peer.leaving ? `${peer.phase}, leaving` : peer.phase], [peer.device], [peer.arithmetic], [reached],
      [number(peer.microbatches_per_second, 2), "number"], [`${number(peer.silent_seconds, 0)} s`, "number"],
      [paths.join("; ")], [peer.flagged_times ? `${peer.flagged_times}×: ${peer.flagged_reason}` : ""]];
  });
}

function showAdmission(admission, invites) {
  $("admission").textContent = `Admission is “${admission.mode}”, with ${admission.members} member(s).`;
  fill("bans", admission.bans, (ban) => [[ban.peer, "id"], [ban.reason], [day(ban.banned_at)]], "no peer is banned", "", "");
  fill("tokens", invites.tokens, (one) => [[one.token], [one.note], [one.state], [one.admitted, "number"],
    [one.uses_left ?? "any", "number"]], "", "none was made", "", "", "");
}

// ---------------------------------------------------------------- refreshing

async function refresh() {
  const results = await Promise.allSettled([
    ask("/api/v1/run").then(showRun),
    ask("/api/v1/stages").then((found) => { stages = found; }),
    ask("/api/v1/peers?limit=500").then((found) => { peers = found.peers; }),
    ask("/api/v1/curve").then(showCurve),
    ask("/api/v1/contributions?limit=50").then(showBoard),
    ask("/api/v1/teams?limit=20").then(showTeams),
    ask("/api/v1/trust").then(showTrust),
    ask("/api/v1/events?limit=100").then((found) => addEvents(found.events)),
    refreshOrganiser(),
  ]);
  showPipeline();
  const failed = results.find((result) => result.status === "rejected");
  if (failed) showLost(failed.reason.message);
}

function showLost(why) {
  showHealth({ state: "unknown", sentence: `this page has lost the coordinator: ${why}` });
}

let stale = false;
let source = null;

function follow() {
  source = new EventSource("/api/v1/events/stream");
  source.addEventListener("open", () => { $("live").textContent = "live"; stale = true; });
  source.addEventListener("run", (event) => showRun(JSON.parse(event.data)));
  source.addEventListener("stages", (event) => { stages = JSON.parse(event.data); stale = true; showPipeline(); });
  source.addEventListener("step", () => { stale = true; });
  source.addEventListener("event", (event) => addEvents([JSON.parse(event.data)]));
  source.addEventListener("error", () => {
    $("live").textContent = "not live";
    source.close();
    setTimeout(() => { refresh(); follow(); }, RECONNECT_MS);
  });
}

$("forget").addEventListener("click", () => { forget(); $("organiser").hidden = true; });
addEventListener("hashchange", () => { token = takeToken(); refreshOrganiser(); });
setInterval(() => {
  if (!stale || document.hidden) return;
  stale = false;
  refresh();
}, REFRESH_MS);
await refresh();
follow();
