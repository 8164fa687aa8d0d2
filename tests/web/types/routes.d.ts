// Requests, answers and messages. Written by scripts/write_route_types.py from nodes/route_schemas.py.

declare namespace Highwater {
  interface Requests {
    follow: Record<string, never>;
    free: Record<string, never>;
    lend: {
      size: string;
      for: string;
      device?: string;
    };
    "lend/give-back": {
      device?: string;
    };
    keep: {
      component: string;
      keep?: boolean;
      at_most?: string;
    };
    release: {
      component?: string;
      device?: string;
    };
    move: {
      component: string;
      placement: string;
    };
    limits: {
      keep_loaded?: number | null;
      idle?: string | null;
    };
    watermark: {
      marks: string;
    };
    "look-ahead": {
      on: boolean;
    };
    "default-profile": {
      profile: string;
    };
    "tiny-pipelines": Record<string, never>;
    "needs/forget": Record<string, never>;
  }
  interface Answers {
    report: {
      version: number;
      now_s: number;
      server_id: string;
      devices?: {
        name: string;
        total_bytes: number;
        free_bytes: number;
        watermark: Record<string, number>;
        own_watermark: {
          low_bytes: number;
          high_bytes: number;
          low_text: string;
          high_text: string;
          source: "set" | "setting" | "default";
        };
        managed_bytes: number;
        other_bytes: number;
        peak_bytes: number;
        lent: {
          num_bytes: number;
          missing_bytes: number;
          left_s: number;
        } | null;
        neighbours: {
          pid: number;
          low_bytes: number;
          high_bytes: number;
          used_bytes: number;
          idle_bytes: number;
          need_bytes: number;
          lent_bytes: number;
        }[];
        unshared: string | null;
        activation_bytes: number | null;
        pinned: {
          num_bytes: number;
          limit_bytes: number;
        } | null;
      }[];
      components?: {
        id: string;
        name: string;
        kind: string;
        node_id: string | null;
        workflow_id: string | null;
        tiers: Record<string, number>;
        precision: string;
        in_effect: boolean;
        leased: boolean;
        last_use_s: number | null;
        bytes_moved: number | null;
        plan: {
          reasons: string[];
          component?: string;
          kind?: string;
          weight_bytes?: number;
          precision?: string;
          precision_rows?: {
            layer: string;
            num_cast: number;
            cast_bytes: number;
            resting_bytes: number;
            saved_bytes: number;
            error: number | null;
            num_kept: number;
            kept_bytes: number;
            why_kept: Record<string, number>;
          }[];
          tier?: string;
          host_bytes?: number;
          buffer_bytes?: number;
          pinned_bytes?: number;
          file_bytes?: number;
          store?: string;
          stored_bytes?: number;
          placement?: string;
          shares?: {
            device: string;
            blocks: number;
            resident_blocks: number;
            streamed_blocks: number;
            prefetch_blocks: number;
            fixed_bytes: number;
            resident_bytes: number;
            streamed_bytes: number;
            read_bytes: number;
            stored_blocks: number;
            stored_bytes: number;
            staging_bytes: number;
            scratch_bytes: number;
            device_bytes: number;
            pass_s: number | null;
            limit_bytes: number | null;
            limited_by: string;
            keeps_bytes: number;
          }[];
        };
        total_bytes: number | null;
        encoded_bytes: number | null;
        staging_bytes: Record<string, number>;
        engine: string;
        num_compiles: number | null;
        uncompiled_blocks: Record<string, number> | null;
        waited_s: number | null;
        next_use: number | null;
        kept: boolean;
        moved: boolean;
        ahead_bytes: number | null;
        hidden_s: number | null;
      }[];
      nodes?: {
        node_id: string;
        title: string;
        run_id: string;
        workflow_id: string | null;
        seconds: number;
        peak_bytes: Record<string, number>;
        weights_bytes: Record<string, number>;
        activation_bytes: Record<string, number>;
        bytes_moved: number;
        tiers: Record<string, number>;
        components: string[];
        staging_bytes: Record<string, number>;
        waited_s: number;
        begin_s: number;
        uncounted: string[];
      }[];
      runs?: {
        run_id: string;
        name: string;
        begin_s: number;
        end_s: number | null;
        bytes_moved: number;
        num_evictions: number;
        reloaded_bytes: Record<string, number>;
      }[];
      events?: {
        t_s: number;
        kind: "plan" | "load" | "evict" | "release" | "keep" | "share" | "reuse" | "drop" | "watermark" | "lend" | "limits" | "recover" | "growth" | "thrashing" | "error";
        component: string;
        bytes: number;
        device: string;
        reason: string;
        component_kind: string;
        to: string;
        run_id: string;
        node_id: string | null;
      }[];
      samples?: {
        t_s: number;
        device: string;
        component_bytes: Record<string, number>;
        allocated_bytes: number;
        peak_bytes: number;
      }[];
      open_nodes?: {
        node_id: string;
        title: string;
        run_id: string;
        workflow_id: string | null;
        seconds: number;
        peak_bytes: Record<string, number>;
        weights_bytes: Record<string, number>;
        activation_bytes: Record<string, number>;
        bytes_moved: number;
        tiers: Record<string, number>;
        components: string[];
        staging_bytes: Record<string, number>;
        waited_s: number;
        begin_s: number;
        uncounted: string[];
      }[];
      loaders?: {
        node_id: string;
        workflow_id: string | null;
        components: string[];
      }[];
      host_features?: Record<string, boolean | string>;
      advice?: {
        text: string;
        key: string;
        values: Record<string, string>;
      }[];
      left_out?: Record<string, number>;
      after_s?: number;
    };
    events: {
      events: {
        t_s: number;
        kind: "plan" | "load" | "evict" | "release" | "keep" | "share" | "reuse" | "drop" | "watermark" | "lend" | "limits" | "recover" | "growth" | "thrashing" | "error";
        component: string;
        bytes: number;
        device: string;
        reason: string;
        component_kind: string;
        to: string;
        run_id: string;
        node_id: string | null;
      }[];
      left_out: number;
    };
    follow: {
      devices: string[];
    };
    free: {
      freed_bytes: Record<string, number>;
    };
    lend: {
      device: string;
      lent_bytes: number;
      freed_bytes: number;
      free_bytes: number;
      missing_bytes: number;
      seconds: number;
    };
    "lend/give-back": {
      device: string;
      lent_bytes: number;
    };
    keep: {
      component: string;
      keep: boolean;
      at_most: string;
    };
    release: {
      released: {
        component: string;
        device: string;
        left_bytes: number;
        freed_bytes: number;
        text: string;
      }[];
    };
    move: {
      component: string;
      placement: string;
      text: string;
    };
    limits: {
      keep_loaded: number | null;
      idle_s: number | null;
    };
    watermark: {
      watermarks: Record<string, {
        low_bytes: number;
        high_bytes: number;
        low_text: string;
        high_text: string;
        source: "set" | "setting" | "default";
      }>;
      notes: string[];
    };
    "look-ahead": {
      on: boolean;
    };
    "default-profile": {
      profile: string;
      title: string;
    };
    "tiny-pipelines": {
      pipelines: Record<string, string>;
    };
    profiles: {
      profiles: {
        name: string;
        title: string;
        ram_bytes: number | null;
        vram_bytes: number | null;
        budgets: Record<string, string>;
        pinned: string;
        prefetch_blocks: number | null;
        quantize: string;
        form: string;
        on_demand: string;
        unload: string;
        reserve: Record<string, string>;
        compile: boolean;
      }[];
    };
    devices: {
      devices: {
        name: string;
        total_bytes: number;
        free_bytes: number;
        watermark: Record<string, number>;
        own_watermark: {
          low_bytes: number;
          high_bytes: number;
          low_text: string;
          high_text: string;
          source: "set" | "setting" | "default";
        };
        managed_bytes: number;
        other_bytes: number;
        peak_bytes: number;
        lent: {
          num_bytes: number;
          missing_bytes: number;
          left_s: number;
        } | null;
        neighbours: {
          pid: number;
          low_bytes: number;
          high_bytes: number;
          used_bytes: number;
          idle_bytes: number;
          need_bytes: number;
          lent_bytes: number;
        }[];
        unshared: string | null;
        activation_bytes: number | null;
        pinned: {
          num_bytes: number;
          limit_bytes: number;
        } | null;
        peers: string[];
      }[];
      hidden_by: Record<string, string>;
      findings: {
        check: string;
        text: string;
        is_warning: boolean;
        remedy: string;
      }[];
    };
    plan: {
      plans: Record<string, {
        placement: string;
        profile: {
          name: string;
          title: string;
          text: string;
          like: string;
          explicit: string;
          reasons: string[];
        };
        components: {
          component: string;
          kind: string;
          weight_bytes: number;
          precision: string;
          precision_rows: {
            layer: string;
            num_cast: number;
            cast_bytes: number;
            resting_bytes: number;
            saved_bytes: number;
            error: number | null;
            num_kept: number;
            kept_bytes: number;
            why_kept: Record<string, number>;
          }[];
          tier: string;
          host_bytes: number;
          buffer_bytes: number;
          pinned_bytes: number;
          file_bytes: number;
          store: string;
          stored_bytes: number;
          placement: string;
          shares: {
            device: string;
            blocks: number;
            resident_blocks: number;
            streamed_blocks: number;
            prefetch_blocks: number;
            fixed_bytes: number;
            resident_bytes: number;
            streamed_bytes: number;
            read_bytes: number;
            stored_blocks: number;
            stored_bytes: number;
            staging_bytes: number;
            scratch_bytes: number;
            device_bytes: number;
            pass_s: number | null;
            limit_bytes: number | null;
            limited_by: string;
            keeps_bytes: number;
          }[];
          reasons: string[];
        }[];
      }>;
      text: string;
    };
    doctor: {
      comfyui: string | null;
      findings: {
        check: string;
        text: string;
        is_warning: boolean;
        remedy: string;
      }[];
      features: Record<string, boolean | string>;
      num_warnings: number;
    };
    needs: {
      files: {
        path: string;
        needs: {
          component: string;
          device: string;
          size: string;
          seen_bytes: number;
          kept_bytes: number | null;
        }[];
      }[];
    };
    "needs/forget": {
      files: {
        path: string;
        num_forgotten: number;
      }[];
    };
  }
  interface Messages {
    node: {
      type: "node";
      server_id: string;
      now_s: number;
      node_id: string;
      title: string;
      run_id: string;
      workflow_id: string | null;
      seconds: number;
      peak_bytes: Record<string, number>;
      weights_bytes: Record<string, number>;
      activation_bytes: Record<string, number>;
      bytes_moved: number;
      tiers: Record<string, number>;
      components: string[];
      staging_bytes: Record<string, number>;
      waited_s: number;
      begin_s: number;
      uncounted: string[];
      devices: {
        name: string;
        total_bytes: number;
        free_bytes: number;
        watermark: Record<string, number>;
        own_watermark: {
          low_bytes: number;
          high_bytes: number;
          low_text: string;
          high_text: string;
          source: "set" | "setting" | "default";
        };
        managed_bytes: number;
        other_bytes: number;
        peak_bytes: number;
        lent: {
          num_bytes: number;
          missing_bytes: number;
          left_s: number;
        } | null;
        neighbours: {
          pid: number;
          low_bytes: number;
          high_bytes: number;
          used_bytes: number;
          idle_bytes: number;
          need_bytes: number;
          lent_bytes: number;
        }[];
        unshared: string | null;
        activation_bytes: number | null;
        pinned: {
          num_bytes: number;
          limit_bytes: number;
        } | null;
      }[];
      prompt_id?: string | null;
    };
    event: {
      type: "event";
      server_id: string;
      now_s: number;
      t_s: number;
      kind: "plan" | "load" | "evict" | "release" | "keep" | "share" | "reuse" | "drop" | "watermark" | "lend" | "limits" | "recover" | "growth" | "thrashing" | "error";
      component: string;
      bytes: number;
      device: string;
      reason: string;
      component_kind: string;
      to: string;
      run_id: string;
      node_id: string | null;
      prompt_id?: string | null;
      workflow_id?: string | null;
    };
  }
  type Report = Answers["report"];
  type Message = Messages[keyof Messages];
}
